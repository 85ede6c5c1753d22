"""Rematerialization: the name of values that a policy can save, and functions whose intermediates are never saved."""

import functools

import jax

MATMUL_OUTPUT = "product"  # expensive to recompute: results of matmuls and of attention
# For elementwise work, whose intermediates are much larger than its inputs. The scan over layers already separates the
# passes, so `prevent_cse` is not needed.
recomputed = functools.partial(jax.checkpoint, prevent_cse=False)
