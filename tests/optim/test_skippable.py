"""Transforms that take a factor and skip steps: the same as scaling before and choosing after."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.helpers import assert_close
from zaya_jax.config import MuonConfig, OptimizerConfig
from zaya_jax.ops import LOCAL
from zaya_jax.optim.build import make_optimizer
from zaya_jax.optim.skippable import SkippableTransform, skippable

SHAPES = {"matrix": (6, 10), "layers": (2, 8, 4), "bias": (5,)}
ROLES = {"matrix": "attention", "layers": "router", "bias": "bias"}


def draw(seed):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in SHAPES.items()}


def test_one_that_is_guarded_stays_itself():
    inner = skippable(optax.scale(-1.0))
    assert isinstance(inner, SkippableTransform)
    assert skippable(inner) is inner
    assert isinstance(make_optimizer(OptimizerConfig(), ROLES, {}), SkippableTransform)


def test_any_transform_takes_a_factor_and_skips_in_its_own_state():
    plain = optax.adam(0.1)
    ours = skippable(plain)
    params, state = draw(0), plain.init(draw(0))
    chex.assert_trees_all_equal(ours.init(params), state)
    updates, new = ours.update(draw(1), state, params, factor=jnp.float32(0.5), skip=jnp.bool_(False), unknown=1)
    expected, theirs = plain.update(jax.tree.map(lambda g: g * 0.5, draw(1)), state, params)
    chex.assert_trees_all_equal(updates, expected)
    chex.assert_trees_all_equal(new, theirs)
    chex.assert_trees_all_equal(ours.update(draw(1), state, params)[1], plain.update(draw(1), state, params)[1])
    _, kept = ours.update(jax.tree.map(lambda g: g * jnp.nan, draw(1)), new, params, skip=jnp.bool_(True))
    chex.assert_trees_all_equal(kept, new)


@pytest.mark.parametrize("form", ["sum", "ema"])
def test_the_whole_optimizer_skips_bit_for_bit_and_scales(form):
    config = OptimizerConfig(muon=MuonConfig(momentum_form=form, newton_schulz_dtype="float32"))
    optimizer = make_optimizer(config, ROLES, {})
    update = jax.jit(functools.partial(optimizer.update, ops=LOCAL))
    params = draw(0)
    _, state = update(draw(1), optimizer.init(params), params)  # so that there are moments to lose
    _, kept = update({name: g.at[0].set(jnp.nan) for name, g in draw(2).items()}, state, params,
                     factor=jnp.float32(jnp.nan), skip=jnp.bool_(True))  # fmt: skip
    chex.assert_trees_all_equal(kept, state)
    scaled = update(draw(2), kept, params, factor=jnp.float32(0.25), skip=jnp.bool_(False))
    expected = update(jax.tree.map(lambda g: 0.25 * g, draw(2)), state, params)
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (scaled[1], state)), strict=True))
    assert_close(scaled, expected, 1e-5)
