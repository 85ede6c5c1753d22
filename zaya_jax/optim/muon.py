"""Muon as an Optax transform (zaya1.md §3.1)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zaya_jax.ops.orthogonalize import orthogonalize


class MuonState(NamedTuple):
    """fp32 momentum of every matrix, of the sum form m ← μm + g."""

    momentum: Any


def scale_by_muon(
    momentum: float, *, nesterov: bool, steps: int, dtype: jax.typing.DTypeLike
) -> optax.GradientTransformation:
    """Momentum, orthogonalised, scaled so that an update has AdamW's typical RMS of 0.2.

    Args:
      momentum: μ.
      nesterov: whether g + μm is orthogonalised instead of m.
      steps: of the Newton–Schulz iteration.
      dtype: of its iterates.

    Returns:
      A transform of leaves with matrices in their last two axes; stacks of layers and experts are batches
      of matrices. Its updates are directions: to be scaled by minus the learning rate.
    """

    def init(params: optax.Params) -> MuonState:
        return MuonState(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[Any, MuonState]:
        del params
        new = jax.tree.map(lambda m, g: momentum * m + g.astype(jnp.float32), state.momentum, updates)
        ahead = jax.tree.map(lambda m, g: g + momentum * m, new, updates) if nesterov else new
        return jax.tree.map(direction, ahead), MuonState(new)

    def direction(m: jax.Array) -> jax.Array:
        return 0.2 * max(m.shape[-2:]) ** 0.5 * orthogonalize(m, steps=steps, dtype=dtype)

    return optax.GradientTransformation(init, update)
