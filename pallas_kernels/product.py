"""The product of two tiles, as every kernel takes it."""

import jax
import jax.numpy as jnp


def product(a: jax.Array, b: jax.Array, contracted: tuple[int, int] = (1, 0)) -> jax.Array:
    """Over axis `contracted` of each, summed in fp32; fp32 tiles are multiplied as they are and not as TF32.

    Args:
      a: a tile of two axes.
      b: another, of the same dtype.
      contracted: the axis of each that is summed over.

    Returns:
      fp32, the other axis of `a` and then that of `b`.
    """
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    axes = (((contracted[0],), (contracted[1],)), ((), ()))
    return jax.lax.dot_general(a, b, axes, precision, preferred_element_type=jnp.float32)
