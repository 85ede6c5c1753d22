"""Optimizers by parameter role, the learning-rate schedule, and load balancing."""
