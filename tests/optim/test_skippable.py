"""Transforms that take a factor and skip steps: the same as scaling before and choosing after."""

import functools

import chex
import jax
import numpy as np
import optax
import pytest

from tests.helpers import assert_close, jit
from zaya_jax.config import MuonConfig, OptimizerConfig
from zaya_jax.ops import LOCAL
from zaya_jax.optim.build import make_optimizer
from zaya_jax.optim.skippable import SkippableTransform, skippable

SHAPES = {"matrix": (6, 10), "layers": (2, 8, 4), "bias": (5,)}
ROLES = {"matrix": "attention", "layers": "router", "bias": "bias"}


def draw(seed):
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def test_one_that_is_guarded_stays_itself():
    inner = skippable(optax.scale(-1.0))
    assert isinstance(inner, SkippableTransform)
    assert skippable(inner) is inner
    assert isinstance(make_optimizer(OptimizerConfig(), ROLES, {}), SkippableTransform)


def test_any_transform_takes_a_factor_and_skips_in_its_own_state():
    plain = optax.adam(0.1)
    ours, plain_update = skippable(plain), jit(plain.update)
    update = jit(functools.partial(ours.update, unknown=1))
    params, state = draw(0), plain.init(draw(0))
    chex.assert_trees_all_equal(ours.init(params), state)
    updates, new = update(draw(1), state, params, factor=np.float32(0.5), skip=np.bool_(False))
    expected, theirs = plain_update(jax.tree.map(lambda g: g * np.float32(0.5), draw(1)), state, params)
    assert_close((updates, new), (expected, theirs), 1e-6)
    assert_close(update(draw(1), state, params)[1], plain_update(draw(1), state, params)[1], 1e-6)
    nans = jax.tree.map(lambda g: g * np.float32(np.nan), draw(1))
    _, kept = update(nans, new, params, factor=np.float32(1), skip=np.bool_(True))
    chex.assert_trees_all_equal(kept, new)


@pytest.mark.parametrize("form", ["sum", "ema"])
def test_the_whole_optimizer_skips_bit_for_bit_and_scales(form):
    config = OptimizerConfig(muon=MuonConfig(momentum_form=form, newton_schulz_dtype="float32"))
    optimizer = make_optimizer(config, ROLES, {})
    update = jit(functools.partial(optimizer.update, ops=LOCAL))
    options = [
        {"factor": np.float32(factor), "skip": np.bool_(skip)} for factor, skip in ((1, 0), (0.25, 0), (np.nan, 1))
    ]
    params = draw(0)
    _, state = update(draw(1), optimizer.init(params), params, **options[0])  # so that there are moments to lose
    nans = {name: np.full_like(g, np.nan) for name, g in draw(2).items()}
    _, kept = update(nans, state, params, **options[2])
    chex.assert_trees_all_equal(kept, state)
    scaled = update(draw(2), kept, params, **options[1])
    expected = update(jax.tree.map(lambda g: np.float32(0.25) * g, draw(2)), state, params, **options[0])
    assert any(np.any(x != y) for x, y in zip(*map(jax.tree.leaves, (scaled[1], state)), strict=True))
    assert_close(scaled, expected, 1e-5)
