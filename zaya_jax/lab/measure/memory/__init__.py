"""Measure the memory bandwidth of a device, and how much of it the model's memory-bound operations reach."""
