"""RMSNorm: statistics in fp32, result in the dtype asked for."""

import jax
import jax.numpy as jnp

from zaya_jax.ops.precision import accumulation_dtype


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`x` over its root mean square along the last axis, times `weight` (docs/reference.md §1.2).

    The stream is cast to `dtype` first and the normalised value again before the product with the weight,
    which is where the reference rounds.
    """
    exact = x.astype(dtype).astype(accumulation_dtype(dtype))
    normed = exact * jax.lax.rsqrt(jnp.mean(exact * exact, -1, keepdims=True) + eps)
    return weight.astype(dtype) * normed.astype(dtype)
