"""The dtype of sums, statistics and the residual stream."""

import jax.numpy as jnp
from jax.typing import DTypeLike


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Return fp32, or fp64 if `dtype` is fp64, so that runs in double precision use it everywhere."""
    return jnp.promote_types(dtype, jnp.float32)
