"""Muon against its formula, and against Optax's own where both mean the same."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax.contrib import MuonDimensionNumbers

from tests.helpers import assert_close, jit
from tests.kernel_helpers import kernels
from zaya_jax.config import MuonConfig
from zaya_jax.ops import LOCAL
from zaya_jax.ops.momentum import momentum_numbers, step_momentum
from zaya_jax.ops.orthogonalize import orthogonalize
from zaya_jax.optim.muon import chunk_size, momentum_coefficients, scale_by_muon
from zaya_jax.optim.muon import muon as public_muon

SCALES = {  # of a matrix [in, out]
    "match_rms_adamw": lambda p, q: 0.2 * max(p, q) ** 0.5,
    "original": lambda p, q: max(1, q / p) ** 0.5,
    "unit_rms": lambda p, q: (q / p) ** 0.5,
}


def muon(split=None, **options):
    transform = scale_by_muon(
        MuonConfig(**{"momentum": 0.9, "newton_schulz_steps": 2, "newton_schulz_dtype": "float32", **options}), split
    )
    return jit(transform.init), jit(functools.partial(transform.update, ops=LOCAL))


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def relative(ours, theirs):
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return float(np.linalg.norm(ours - theirs) / np.linalg.norm(theirs))


orthogonal = functools.partial(jit(orthogonalize, static_argnames=("steps", "dtype")), dtype=jnp.float32)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_the_sum_and_nesterov_looks_ahead(nesterov):
    init, update = muon(momentum=0.5, nesterov=nesterov)
    grads = [{"a": draw(seed, 6, 10), "b": draw(9 + seed, 2, 3, 8, 4)} for seed in range(3)]
    state = init(grads[0])
    assert not any(np.any(x) for x in jax.tree.leaves(state))
    chex.assert_trees_all_equal_shapes(jax.tree.leaves(state), jax.tree.leaves(grads[0]))
    expected = jax.tree.map(np.zeros_like, grads[0])
    for grad in grads:
        out, state = update(grad, state)
        expected = jax.tree.map(lambda m, g: 0.5 * m + g, expected, grad)
        chex.assert_trees_all_close(state[0].trace, expected, rtol=1e-6, atol=1e-6)
        ahead = jax.tree.map(lambda m, g: g + 0.5 * m if nesterov else m, expected, grad)
        for name, m in ahead.items():
            direction = 0.2 * max(m.shape[-2:]) ** 0.5 * orthogonal(m, steps=2)
            assert_close(out[name], direction, 1e-3)


@pytest.mark.parametrize(
    ("nesterov", "coefficients", "consistent_rms"),
    [(False, "standard", 0.2), (True, "dion", 0.2), (True, "standard", None)],
)
def test_the_ema_form_is_optax_muon(nesterov, coefficients, consistent_rms):
    """Several steps with decay, of a wide matrix and a stack of tall ones."""
    params = {"wide": draw(0, 6, 14), "experts": draw(3, 2, 3, 10, 6)}
    theirs = optax.contrib.muon(
        0.01, coefficients, beta=0.9, weight_decay=0.3, nesterov=nesterov, consistent_rms=consistent_rms,
        muon_weight_dimension_numbers=dict.fromkeys(params, MuonDimensionNumbers(-2, -1)),
    )  # fmt: skip
    scaling = "match_rms_adamw" if consistent_rms else "original"
    init, update = muon(
        momentum_form="ema", nesterov=nesterov, coefficients=coefficients, scaling=scaling, newton_schulz_steps=5
    )
    their_update = jit(theirs.update)
    state, their_state = init(params), theirs.init(params)
    for step in range(4):
        grads = jax.tree.map(lambda x, step=step: draw(10 + step, *x.shape), params)
        directions, state = update(grads, state)
        out = jax.tree.map(lambda p, u: -0.01 * (np.asarray(u) + 0.3 * p), params, directions)
        expected, their_state = their_update(grads, their_state, params)
        for name in params:
            assert relative(out[name], expected[name]) < 1e-5, (name, step)
        params = jax.tree.map(np.add, params, jax.device_get(expected))


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_mean_is_corrected_for_the_steps_it_lacks(nesterov):
    """Newton–Schulz would take the factor out again, so this looks at what it is given."""
    config = MuonConfig(momentum=0.75, momentum_form="ema", nesterov=nesterov)
    state, mean = np.zeros((2, 3), np.float32), 0.0
    for step in range(1, 4):
        g = draw(step, 2, 3)
        numbers = momentum_numbers(momentum_coefficients(config, jnp.int32(step)), 1.0, False, jnp.float32)
        state, out = step_momentum(g, state, numbers, jnp.float32)
        mean = 0.75 * mean + 0.25 * g
        ahead = 0.75 * mean / (1 - 0.75 ** (step + 1)) + 0.25 * g / (1 - 0.75**step)
        assert_close(out, ahead if nesterov else mean / (1 - 0.75**step), 1e-6)


@pytest.mark.parametrize("scaling", SCALES)
def test_an_update_has_the_scale_of_its_shape(scaling):
    grad = {"wide": draw(0, 6, 24), "tall": draw(1, 2, 24, 6)}
    init, update = muon(scaling=scaling, newton_schulz_steps=3)
    out, _ = update(grad, init(grad))
    for name, g in grad.items():
        expected = SCALES[scaling](*g.shape[-2:]) * orthogonal(g, steps=3)
        assert relative(out[name], expected) < 1e-5, name


def test_a_split_leaf_is_so_many_leaves():
    """Over two steps: each part with its own norm, scale and momentum."""
    apart = [[draw(10 * step + part, 2, 3, 12, 8) * 10**part for part in range(3)] for step in range(2)]
    options = {"momentum_form": "ema", "scaling": "unit_rms"}
    (init, update), (alone_init, alone_update) = muon({"fused": 3}, **options), muon(**options)
    state = init({"fused": np.concatenate(apart[0], -1), "plain": apart[0][0]})
    alone_state = alone_init(dict(enumerate(apart[0])))
    for parts in apart:
        out, state = update({"fused": np.concatenate(parts, -1), "plain": parts[0]}, state)
        alone, alone_state = jax.device_get(alone_update(dict(enumerate(parts)), alone_state))
        assert relative(out["fused"], np.concatenate([alone[part] for part in range(3)], -1)) < 1e-5
        assert relative(out["plain"], alone[0]) < 1e-5, "a leaf that is not split is one matrix"


@pytest.mark.parametrize(("form", "nesterov"), [("sum", True), ("ema", False)])
def test_state_is_float32_for_gradients_in_bfloat16(form, nesterov):
    init, update = muon(momentum_form=form, nesterov=nesterov, newton_schulz_dtype="bfloat16")
    _, exact_update = muon(momentum_form=form, nesterov=nesterov)
    state = exact_state = init({"w": jnp.zeros((8, 8), jnp.bfloat16)})
    for seed in range(3):
        grad = jnp.asarray(draw(seed, 8, 8), jnp.bfloat16)
        out, state = update({"w": grad}, state)
        exact, exact_state = exact_update({"w": grad.astype(jnp.float32)}, exact_state)
        chex.assert_type([*(x for x in jax.tree.leaves(state) if x.ndim), out["w"]], jnp.float32)
        assert_close(state, exact_state, 1e-6)
        assert relative(out["w"], exact["w"]) < 0.1


def test_with_its_kernels_a_step_is_the_same_and_a_skipped_one_is_none():
    grads = {"tall": draw(1, 2, 17, 9)}
    transform = scale_by_muon(MuonConfig(momentum_form="ema", newton_schulz_dtype="float32"))
    state = transform.init(grads)
    steps = []
    for platform in ("interpret", "cpu"):
        update = jit(functools.partial(transform.update, ops=kernels(platform).ops))
        steps.append(update(grads, state, factor=np.float32(0.3), skip=np.bool_(False)))
        broken = {name: np.full_like(g, np.nan) for name, g in grads.items()}
        _, kept = update(broken, steps[-1][1], factor=np.float32(np.nan), skip=np.bool_(True))
        chex.assert_trees_all_equal(kept, steps[-1][1])
    assert_close(steps[0][1], steps[1][1], 1e-6)
    assert_close(steps[0][0], steps[1][0], 1e-3)
    assert float(jnp.abs(steps[0][0]["tall"]).max()) > 0.1


PARAMS = {"layers": draw(0, 3, 8, 6), "vector": draw(2, 6)}
MATRICES = {name: x for name, x in PARAMS.items() if x.ndim > 1}
IS_MATRIX = {name: x.ndim > 1 for name, x in PARAMS.items()}


def third_update(transform, params, calls=3):
    """The update of the third step that moves anything, on gradients that are the same in all calls."""
    state, grads = jit(transform.init)(params), jax.tree.map(lambda x: x[..., ::-1], params)
    update = jit(transform.update)
    for _ in range(calls):
        updates, state = update(grads, state, params)
    return updates


@pytest.fixture(scope="module")
def alone():
    return third_update(public_muon(0.02), MATRICES)


def partitioned():
    labels = {name: "muon" if is_matrix else "adamw" for name, is_matrix in IS_MATRIX.items()}
    return optax.multi_transform({"muon": public_muon(0.02), "adamw": optax.adamw(1e-3)}, labels)


@pytest.mark.parametrize(
    ("transform", "params", "calls"),
    [
        (lambda: optax.chain(optax.identity(), optax.masked(public_muon(lambda _: 0.02), IS_MATRIX)), PARAMS, 3),
        (lambda: optax.MultiSteps(optax.inject_hyperparams(public_muon)(learning_rate=0.02), 2), MATRICES, 6),
        (partitioned, PARAMS, 3),
    ],
    ids=["chain of masked", "MultiSteps of inject_hyperparams", "multi_transform"],
)
def test_muon_gives_the_same_updates_inside_optax(alone, transform, params, calls):
    updates = third_update(transform(), params, calls)
    chex.assert_trees_all_close({name: updates[name] for name in MATRICES}, alone, rtol=1e-6)
    chex.assert_tree_all_finite(updates)


def test_a_leaf_that_is_not_a_matrix_is_refused_by_name():
    with pytest.raises(ValueError, match=r"block\.bias has shape \(6,\)"):
        public_muon(0.02).init({"block": {"bias": PARAMS["vector"], "kernel": PARAMS["layers"]}})


def test_chunks_of_a_stack_are_orthogonalized_as_the_whole(monkeypatch):
    grads = {"a": draw(0, 3, 4, 8, 12)}
    init, update = muon(split={"a": 2})
    expected, _ = update(grads, init(grads))
    monkeypatch.setattr("zaya_jax.optim.muon.CHUNK", 5 * 8 * 12 * 4)  # five matrices, of which four divide twelve
    assert [chunk_size(count, 8 * 12 * 4) for count in (12, 7, 3)] == [4, 1, 3]
    init, update = muon(split={"a": 2})
    out, _ = update(grads, init(grads))
    assert_close(out["a"], expected["a"], 1e-6)
