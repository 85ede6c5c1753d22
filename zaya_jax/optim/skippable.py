"""Transforms that scale gradients and skip steps themselves, so that nothing has to be done before and after them."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


class SkippableTransform(optax.GradientTransformationExtraArgs):
    """A transform whose `update` takes `factor` and `skip`.

    `factor` multiplies the gradients. Where `skip` is true the state stays as it is, bit for bit, whatever the
    gradients are; the updates then say nothing.
    """


def skippable(inner: optax.GradientTransformation) -> SkippableTransform:
    """`inner` with `factor` and `skip`, in the same state; itself where it has them."""
    if isinstance(inner, SkippableTransform):
        return inner
    inner = optax.with_extra_args_support(inner)

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, *,
        factor: jax.Array | float = 1.0, skip: jax.Array | bool = False, **extra: Any,
    ) -> tuple[optax.Updates, optax.OptState]:  # fmt: skip
        scaled = jax.tree.map(lambda g: g * factor, updates)
        moves, new = inner.update(scaled, state, params, **extra)
        return moves, jax.tree.map(lambda old, now: jnp.where(skip, old, now), state, new)

    return SkippableTransform(inner.init, update)
