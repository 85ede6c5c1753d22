"""The matmul of two tiles, for all kernels."""

import jax
import jax.numpy as jnp


def product(a: jax.Array, b: jax.Array, contracted: tuple[int, int] = (1, 0)) -> jax.Array:
    """Multiply two tiles with sums in fp32; fp32 tiles are multiplied exactly, not in TF32.

    Args:
      a: tile with two axes.
      b: tile of the same dtype.
      contracted: axis of `a`, and axis of `b`, to sum over.

    Returns:
      fp32, with the other axis of `a`, then that of `b`.
    """
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision, preferred_element_type=jnp.float32)
