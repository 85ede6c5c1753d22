"""Muon's momentum update and direction, one pass over memory (docs/reference.md §3.1)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

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
    """Pack the scalars that `step_momentum` takes, [6] in `dtype`: factor of the gradient, skip, a, b, c and d.

    With `skip`, the momentum must stay unchanged.
    """
    return jnp.stack([jnp.asarray(number, dtype) for number in (factor, skip, *coefficients)])


def step_momentum(
    gradient: jax.Array, momentum: jax.Array, numbers: jax.Array, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Compute the new momentum m' = a·m + b·g and the direction c·m' + d·g, in `dtype`; not differentiable.

    g is the gradient, of any shape, times the factor in `numbers` (`momentum_numbers`); m is at least fp32. Returns the
    new momentum, or m bitwise unchanged if the step is skipped; and the direction, undefined if it is.
    """
    factor, skip, a, b, c, d = numbers
    scaled = factor * gradient.astype(momentum.dtype)
    new = a * momentum + b * scaled
    return jnp.where(skip != 0, momentum, new), (c * new + d * scaled).astype(dtype)
