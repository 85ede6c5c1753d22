"""Transforms that scale gradients and skip steps in their own pass, which saves passes over all state."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


class SkippableTransform(optax.GradientTransformationExtraArgs):
    """A transform whose `update` takes `factor` and `skip`.

    `factor` multiplies the gradients. If `skip` is true, the state stays bitwise the same, whatever the gradients are,
    and the updates are undefined.
    """


def skippable(inner: optax.GradientTransformation) -> SkippableTransform:
    """Add `factor` and `skip` to a transform, with the same state; return it unchanged if it already has them."""
    if isinstance(inner, SkippableTransform):
        return inner
    inner = optax.with_extra_args_support(inner)

    def update(
        updates: Any, state: Any, params: Any = None, *, factor: Any = 1.0, skip: Any = False, **extra: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        scaled = jax.tree.map(lambda g: g * factor, updates)
        moves, new = inner.update(scaled, state, params, **extra)
        return moves, jax.tree.map(lambda old, now: jnp.where(skip, old, now), state, new)

    return SkippableTransform(inner.init, update)
