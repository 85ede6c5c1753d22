"""Pallas kernels as functions of arrays, called only through `zaya_jax.ops`."""
