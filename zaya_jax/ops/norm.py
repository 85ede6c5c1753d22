"""RMSNorm, with statistics in fp32."""

import functools

import jax
import jax.numpy as jnp

from zaya_jax.ops.names import recomputed
from zaya_jax.ops.precision import accumulation_dtype


@functools.partial(recomputed, static_argnums=(2, 3))
def rms_norm(x: jax.Array, weight: jax.Array, eps: float, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Divide `x` by its root mean square along the last axis, and multiply by `weight` (docs/reference.md §1.2).

    To round where ZAYA1's implementation does, `x` is cast to `dtype` first, and the normalized value again before the
    multiplication by the weight.
    """
    exact = x.astype(dtype).astype(accumulation_dtype(dtype))
    normed = exact * jax.lax.rsqrt(jnp.mean(exact * exact, -1, keepdims=True) + eps)
    return weight.astype(dtype) * normed.astype(dtype)
