"""Measurements of this machine: products, memory, storage, collectives, kernels and steps."""
