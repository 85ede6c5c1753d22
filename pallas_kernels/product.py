"""The matmul of two tiles, for all kernels."""

import jax
import jax.numpy as jnp


def product(a: jax.Array, b: jax.Array, contracted: tuple[int, int] = (1, 0)) -> jax.Array:
    """Multiply two tiles of the same dtype with sums in fp32; fp32 tiles are multiplied exactly, not in TF32.

    `contracted` are the axis of `a` and that of `b` to sum over; the result has the other axis of `a`, then of `b`.
    """
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision, preferred_element_type=jnp.float32)
