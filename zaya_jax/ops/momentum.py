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
# OnMatrices updates a leaf however it is sharded: (name, (gradient, momentum), numbers, elementwise function, function
# of whole matrices) → (new momentum, result), sharded like the leaf.
Local = Callable[[jax.Array, jax.Array, jax.Array], Pair]  # numbers, gradient, momentum → new momentum, direction
OfMatrices = Callable[[jax.Array], jax.Array]  # [stack, p, q] → the same shape, each matrix separately
OnMatrices = Callable[[str, Pair, jax.Array, Local, OfMatrices], Pair]


def momentum_numbers(
    coefficients: tuple[Scalar, Scalar, Scalar, Scalar], factor: Scalar, skip: Scalar, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """Pack the scalars that `step_momentum` takes.

    Args:
      coefficients: a, b, c, d.
      factor: factor of the gradient.
      skip: whether the momentum must stay unchanged.
      dtype: dtype of the momentum.

    Returns:
      [6] in `dtype`: factor, `skip` as 1 or 0, coefficients.
    """
    return jnp.stack([jnp.asarray(number, dtype) for number in (factor, skip, *coefficients)])


def step_momentum(
    gradient: jax.Array, momentum: jax.Array, numbers: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Compute the new momentum m' = a·m + b·g and the direction c·m' + d·g; not differentiable.

    g is the gradient times the factor in `numbers`.

    Args:
      gradient: any shape.
      momentum: m, of the same shape, at least fp32.
      numbers: result of `momentum_numbers`, in the dtype of `momentum`.
      dtype: dtype of the direction.

    Returns:
      The new momentum, or m bitwise unchanged if the step is skipped; and the direction, undefined if it is.
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
    return ("The momentum kernel supports gradients and directions in bfloat16 or float32, with momentum in float32, "
            f"not {gradient.dtype} and {jnp.dtype(dtype)}, with momentum in {momentum.dtype}."
            )  # fmt: skip


def _kernel(
    architecture: str, gradient: jax.Array, momentum: jax.Array, numbers: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    return momentum_and_direction(gradient, momentum, numbers, dtype=dtype, architecture=architecture)


def _checks(model: ModelConfig, training: bool) -> dict[str, Check]:
    def run(momentum: Any, gradient: jax.Array, old: jax.Array) -> Any:
        """Run one step, and one that is skipped because of a NaN gradient, in the dtypes of training."""
        exact = accumulation_dtype(old.dtype)

        def step(gradient: jax.Array, *, skip: bool) -> tuple[jax.Array, jax.Array]:
            numbers = momentum_numbers((0.95, 1.0, 0.95, 1.0), 0.5, skip, exact)
            return momentum(gradient.astype(exact), old.astype(exact), numbers, gradient.dtype)

        kept, _ = step(gradient + jnp.nan, skip=True)
        return *step(gradient, skip=False), kept

    matrix = Input((2, model.hidden_size, 2 * model.expert_size - 1))
    return {"momentum": Check(run, (matrix, matrix), 2, gradient=False)} if training else {}


MOMENTUM = Operation("momentum", step_momentum, _checks, (Kernel("pallas", _kernel, _unsupported),))
