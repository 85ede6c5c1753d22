"""The dtype of what must be exact: sums, statistics, the stream between layers."""

import jax.numpy as jnp
from jax.typing import DTypeLike


def accumulation_dtype(dtype: DTypeLike) -> jnp.dtype:
    """fp32, or fp64 where `dtype` is fp64: runs in double precision are so throughout."""
    return jnp.promote_types(dtype, jnp.float32)
