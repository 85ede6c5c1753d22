"""A polynomial of Gram matrices: of symmetric products, of which kernels do only one half (zaya1.md §3.2)."""

import math

import jax
import jax.numpy as jnp

from pallas_kernels.symmetric import gram, polynomial


def gram_polynomial(
    x_xpq: jax.Array, b: jax.Array, c: jax.Array, *, scale_x: jax.Array | None = None, platform: str | None = None
) -> jax.Array:
    """bG + cG², where G = s²XXᵀ; it is not differentiated.

    Args:
      x_xpq: matrices in the last two axes, any axes before.
      b: scalar, in the dtype that sums are to have.
      c: likewise.
      scale_x: s of each matrix, in the dtype of sums; 1 where None.
      platform: whose kernels to use; `jnp.matmul` where None.

    Returns:
      [x, p, p] in the dtype of `x_xpq`, by kernels exactly symmetric. G is rounded to that dtype before it is
      squared, and only there.

    Raises:
      ValueError: kernels multiply bf16 and fp32 alone, and sum in fp32.
    """
    if scale_x is None:
        scale_x = jnp.ones(x_xpq.shape[:-2], b.dtype)
    if platform is None:
        return _reference(x_xpq, scale_x[..., None, None], b, c)
    if x_xpq.dtype not in (jnp.bfloat16, jnp.float32) or b.dtype != jnp.float32:
        raise ValueError("Kernels of symmetric products take bfloat16 or float32 and sum in float32, but this one is "
                         f"of {x_xpq.dtype} with sums in {b.dtype}.")  # fmt: skip
    *stack, p, q = x_xpq.shape
    low, exact = gram(x_xpq.reshape(math.prod(stack), p, q), scale_x.reshape(-1), platform=platform)
    return polynomial(low, exact, jnp.stack([b, c]), platform=platform).reshape(*stack, p, p)


def _reference(x_xpq: jax.Array, scale_x11: jax.Array, b: jax.Array, c: jax.Array) -> jax.Array:
    # The square of a scale may be out of the range of sums.
    gram_xpp = product(x_xpq, jnp.swapaxes(x_xpq, -1, -2), b.dtype) * scale_x11 * scale_x11
    low = gram_xpp.astype(x_xpq.dtype)
    return (b * gram_xpp + c * product(low, low, b.dtype)).astype(x_xpq.dtype)


def product(left: jax.Array, right: jax.Array, sums: jax.typing.DTypeLike) -> jax.Array:
    """Of stacks of matrices of one dtype; the result is as its sums are."""
    # Some GPUs would round fp32 operands to TF32; those in bf16 are exact whatever the precision.
    precision = jax.lax.Precision.HIGHEST if left.dtype != jnp.bfloat16 else None
    return jnp.matmul(left, right, precision=precision, preferred_element_type=sums)
