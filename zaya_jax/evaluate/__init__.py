"""Evaluation of a model during training."""
