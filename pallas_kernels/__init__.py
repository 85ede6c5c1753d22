"""Kernels: arrays in, arrays out. Reached only through `zaya_jax.ops`."""
