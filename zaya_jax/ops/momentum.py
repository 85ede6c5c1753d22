"""Muon's momentum update and direction, which a kernel does in one pass over memory (docs/reference.md §3.1)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.momentum import momentum_and_direction
from zaya_jax.config import ModelConfig
from zaya_jax.ops.operation import DTYPES, Check, Input, Kernel, Operation
from zaya_jax.ops.precision import accumulation_dtype

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
    return jnp.stack([jnp.asarray(number, dtype) for number in (factor, skip, *coefficients)])


def step_momentum(
    gradient: jax.Array, momentum: jax.Array, numbers: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """a·m + b·g, where g is the gradient times a factor, and c of it + d·g; it is not differentiated.

    Args:
      gradient: of any shape.
      momentum: m, of the same shape, at least fp32.
      numbers: of `momentum_numbers`, in the dtype of `momentum`.
      dtype: of the second result.

    Returns:
      The new momentum, or where the step is skipped m, bit for bit; and the direction, which says nothing then.
    """
    factor, skip, a, b, c, d = numbers
    scaled = factor * gradient.astype(momentum.dtype)
    new = a * momentum + b * scaled
    return jnp.where(skip != 0, momentum, new), (c * new + d * scaled).astype(dtype)


def _unsupported(
    _architecture: str, gradient: jax.Array, momentum: jax.Array, _numbers: jax.Array, dtype: jax.typing.DTypeLike
) -> str:
    if gradient.dtype in DTYPES and jnp.dtype(dtype) in DTYPES and momentum.dtype == jnp.float32:
        return ""
    return ("The kernel of momentum takes gradients and gives directions in bfloat16 or float32, with momentum in "
            f"float32, but these are {gradient.dtype} and {jnp.dtype(dtype)}, with momentum in {momentum.dtype}."
            )  # fmt: skip


def _kernel(
    architecture: str, gradient: jax.Array, momentum: jax.Array, numbers: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    return momentum_and_direction(gradient, momentum, numbers, dtype=dtype, architecture=architecture)


def _checks(model: ModelConfig, training: bool) -> dict[str, Check]:
    def run(momentum: Any, gradient: jax.Array, old: jax.Array) -> Any:
        """A step, and one that is skipped for a gradient that is not finite; in the dtypes of training."""
        exact = accumulation_dtype(old.dtype)

        def step(gradient: jax.Array, *, skip: bool) -> tuple[jax.Array, jax.Array]:
            numbers = momentum_numbers((0.95, 1.0, 0.95, 1.0), 0.5, skip, exact)
            return momentum(gradient.astype(exact), old.astype(exact), numbers, gradient.dtype)

        kept, _ = step(gradient + jnp.nan, skip=True)
        return *step(gradient, skip=False), kept

    matrix = Input((2, model.hidden_size, 2 * model.expert_size - 1))
    return {"momentum": Check(run, (matrix, matrix), 2, gradient=False)} if training else {}


MOMENTUM = Operation("momentum", step_momentum, _checks, (Kernel("pallas", _kernel, _unsupported),))
