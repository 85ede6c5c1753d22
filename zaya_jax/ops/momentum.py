"""Muon's momentum and the direction that it gives, of which a kernel makes one pass over memory (zaya1.md §3.1)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from pallas_kernels.momentum import momentum_and_direction

Scalar = jax.Array | float | bool
Pair = tuple[jax.Array, jax.Array]
# How a leaf is moved wherever it lies: (name, its gradient and momentum, numbers, what is done to each element, what is
# done to whole matrices) → the new momentum and the matrices, placed as the leaf.
Local = Callable[[jax.Array, jax.Array, jax.Array], Pair]  # numbers, gradient, momentum → new momentum, direction
OfMatrices = Callable[[jax.Array], jax.Array]  # [stack, p, q] → the same shape, each matrix on its own
OnMatrices = Callable[[str, Pair, jax.Array, Local, OfMatrices], Pair]


def momentum_numbers(
    coefficients: tuple[Scalar, Scalar, Scalar, Scalar], factor: Scalar, skip: Scalar, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """The numbers that `step_momentum` takes.

    Args:
      coefficients: a, b, c, d.
      factor: of the gradient.
      skip: whether momentum is to stay as it is.
      dtype: of the momentum.

    Returns:
      [6]: factor, 1 or 0 for `skip`, coefficients.
    """
    return jnp.stack([jnp.asarray(one, dtype) for one in (factor, skip, *coefficients)])


def step_momentum(
    gradient: jax.Array, momentum: jax.Array, numbers: jax.Array, dtype: jax.typing.DTypeLike, *,
    platform: str | None = None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """a·m + b·g, where g is the gradient times a factor, and c of it + d·g; it is not differentiated.

    Args:
      gradient: of any shape.
      momentum: m, of the same shape, at least fp32.
      numbers: of `momentum_numbers`, in the dtype of `momentum`.
      dtype: of the second result.
      platform: whose kernel to use; jax.numpy where None.

    Returns:
      The new momentum, or where the step is skipped m, bit for bit; and the direction, which says nothing then.

    Raises:
      ValueError: the kernel takes and gives bf16 and fp32 alone, and its momentum is fp32.
    """
    if platform is None:
        return _reference(gradient, momentum, numbers, dtype)
    allowed = (jnp.bfloat16, jnp.float32)
    if gradient.dtype not in allowed or jnp.dtype(dtype) not in allowed or momentum.dtype != jnp.float32:
        raise ValueError("The kernel of momentum takes gradients and gives directions in bfloat16 or float32, with "
                         f"momentum in float32, but these are {gradient.dtype} and {jnp.dtype(dtype)}, with momentum "
                         f"in {momentum.dtype}.")  # fmt: skip
    return momentum_and_direction(gradient, momentum, numbers, dtype=dtype, platform=platform)


def _reference(
    gradient: jax.Array, momentum: jax.Array, numbers: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    factor, skip, a, b, c, d = numbers
    scaled = factor * gradient.astype(momentum.dtype)
    new = a * momentum + b * scaled
    return jnp.where(skip != 0, momentum, new), (c * new + d * scaled).astype(dtype)
