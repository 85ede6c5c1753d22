"""Muon as an Optax transform (zaya1.md §3.1)."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from zaya_jax.config import MuonConfig
from zaya_jax.ops.orthogonalize import orthogonalize
from zaya_jax.ops.precision import wide
from zaya_jax.ops.target import Target


class MeanState(NamedTuple):
    """fp32 mean of the gradients, and the int32 number of steps, which its correction needs."""

    steps: jax.Array
    mean: Any


OnMatrices = Callable[[str, jax.Array, Callable[[jax.Array], jax.Array]], jax.Array]


def _here(name: str, m: jax.Array, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
    del name
    return function(m)


def scale_by_muon(config: MuonConfig, split: Mapping[str, int] | None = None) -> optax.GradientTransformationExtraArgs:
    """Momentum, orthogonalised and scaled by its shape.

    Args:
      config: its rate and decay are not looked at.
      split: number of matrices that stand side by side along the last axis of a leaf, by the leaf's name; each
        is orthogonalised and scaled on its own. A leaf without an entry is one matrix.

    Returns:
      A transform of flat dicts by name, of leaves with matrices [in, out] in their last two axes; stacks of
      layers and experts are batches of matrices. Its updates are directions, to be scaled by minus the learning
      rate; its state is the momentum, in the parameters' shapes and at least fp32, and for the mean a number of
      steps.
      `update` takes `on_matrices`, which applies a function to matrices that lie over several devices:
      (name, leaf, function of whole matrices) → result, placed as the leaf; and `target`, what the orthogonalising
      is compiled for (the default device where None).
    """
    parts = split or {}

    def directions(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, *,
        on_matrices: OnMatrices = _here, target: Target | None = None, **_: Any,
    ) -> tuple[optax.Updates, optax.OptState]:  # fmt: skip
        del params

        def one(path: tuple[Any, ...], m: jax.Array) -> jax.Array:
            name = jax.tree_util.keystr(path, simple=True)
            return on_matrices(name, m, lambda matrices: _direction(matrices, config, parts.get(name, 1), target))

        return jax.tree_util.tree_map_with_path(one, updates), state

    if config.momentum_form == "sum":
        momentum = optax.trace(config.momentum, config.nesterov)
    else:
        momentum = corrected_mean(config.momentum, nesterov=config.nesterov)
    return optax.chain(_in_wide(momentum), optax.GradientTransformationExtraArgs(optax.init_empty_state, directions))


def _in_wide(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` with state and updates of at least fp32."""

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda x: x.astype(wide(x.dtype)), tree)

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[Any, Any]:
        return inner.update(cast(updates), state, params)

    return optax.GradientTransformation(lambda params: inner.init(cast(params)), update)


def corrected_mean(decay: float, *, nesterov: bool) -> optax.GradientTransformation:
    """The momentum of `optax.contrib.muon`: m ← μm + (1 − μ)g, over 1 − μⁿ at step n.

    With Nesterov it is μm / (1 − μⁿ⁺¹) + (1 − μ)g / (1 − μⁿ).
    """

    def init(params: optax.Params) -> MeanState:
        return MeanState(jnp.zeros((), jnp.int32), optax.tree.zeros_like(params))

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None) -> tuple[Any, MeanState]:
        del params
        steps = state.steps + 1
        mean = optax.tree.update_moment(updates, state.mean, decay, 1)
        if not nesterov:
            return optax.tree.bias_correction(mean, decay, steps), MeanState(steps, mean)
        ahead = jax.tree.map(
            lambda m, g: decay * m + (1 - decay) * g,
            optax.tree.bias_correction(mean, decay, steps + 1),
            optax.tree.bias_correction(updates, decay, steps),
        )
        return ahead, MeanState(steps, mean)

    return optax.GradientTransformation(init, update)


def _direction(m_xpq: jax.Array, config: MuonConfig, parts: int, target: Target | None) -> jax.Array:
    *stack, p, q = m_xpq.shape
    iterates = config.iterates if config.iterates == "bfloat16" else wide(m_xpq.dtype)
    apart = jnp.moveaxis(m_xpq.reshape(*stack, p, parts, q // parts), -2, -3)
    orthogonal = orthogonalize(
        apart, steps=config.newton_schulz_steps, dtype=iterates, coefficients=config.coefficients, target=target
    )
    return jnp.moveaxis(_scale(p, q // parts, config) * orthogonal, -3, -2).reshape(m_xpq.shape)


def _scale(rows: int, columns: int, config: MuonConfig) -> float:
    """Factor of an orthogonal matrix of `rows` inputs and `columns` outputs (torch stores its transpose)."""
    match config.scaling:
        case "match_rms_adamw":  # root mean square 0.2, which is AdamW's usual one (arXiv 2502.16982)
            return 0.2 * max(rows, columns) ** 0.5
        case "original":  # Jordan's Muon
            return max(1, columns / rows) ** 0.5
        case "unit_rms":  # an input of root mean square 1 gives an output of it (arXiv 2310.17813)
            return (columns / rows) ** 0.5
