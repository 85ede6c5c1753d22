"""The router: what it chooses, with what weight, and what it hands on."""

import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings

from tests.helpers import assert_close, jit, seeds, tiny_config
from zaya_jax.model.router import Router
from zaya_jax.ops import LOCAL
from zaya_jax.ops.router import RouterWeights
from zaya_jax.ops.router import router as routed

CONFIG = tiny_config()
E, R = CONFIG.num_experts, CONFIG.router_size
SHAPE = (2, 9)


@functools.cache
def router(seed=0, config=CONFIG):
    rng = np.random.default_rng(seed)
    shapes = jax.eval_shape(functools.partial(Router, config), jax.random.key(0))
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.7, x.shape), jnp.float32), shapes)


def with_bias(bias, seed=0):
    drawn = router(seed)
    leaves, tree = jax.tree.flatten(drawn)
    return jax.tree.unflatten(tree, [jnp.asarray(bias, jnp.float32) if x.shape == (E + 1,) else x for x in leaves])


def draw(seed):
    rng = np.random.default_rng(seed)
    h = rng.normal(size=(*SHAPE, CONFIG.hidden_size)).astype(np.float32)
    return h, rng.normal(size=(*SHAPE, R)).astype(np.float32)


route = jit(lambda router, h, state, real=True: router(h, state, jnp.full(h.shape[:2], real), LOCAL))
probabilities = jit(lambda router, h, state: router.probabilities(h, state, LOCAL)[0])


def gelu(x):
    return 0.5 * x * (1 + np.vectorize(math.erf)(x / 2**0.5))


def reference(router, h, state):
    """docs/reference.md §1.4 in float64: probabilities and the state handed on."""
    w = {name: np.asarray(x[...], np.float64) for name, x in vars(router).items() if isinstance(x, nnx.Variable)}
    r = h.astype(np.float64) @ w["down"] + w["down_bias"] + state * w.get("state_scale", 0)
    t = r / np.sqrt((r**2).mean(-1, keepdims=True) + CONFIG.norm_eps) * np.asarray(router.norm.weight[...], np.float64)
    for name in ("hidden1", "hidden2"):
        if name in w:
            t = gelu(t @ w[name] + w[f"{name}_bias"])
    z = t @ w["output"]
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True), r


@given(seed=seeds())
def test_the_weight_is_the_unbiased_probability_of_the_class_the_bias_chose(seed):
    h, state = draw(seed)
    bias = np.random.default_rng(seed).normal(0, 0.3, E + 1)
    expected, handed_on = reference(router(), h, state)
    routing = route(with_bias(bias), h, state)
    chex.assert_type([routing.expert_bs, routing.weight_bs, routing.state_bsr], [jnp.int32, jnp.float32, jnp.float32])
    assert_close(probabilities(with_bias(bias), h, state), expected, 1e-5)
    assert_close(routing.state_bsr, handed_on, 1e-5)
    np.testing.assert_array_equal(routing.expert_bs, (expected + bias).argmax(-1))
    weight = np.take_along_axis(expected, np.asarray(routing.expert_bs)[..., None], -1)[..., 0]
    assert_close(routing.weight_bs, np.where(routing.expert_bs == E, 0, weight), 1e-5)


@pytest.mark.parametrize(("layers", "averaging"), [(1, True), (2, False), (3, False)])
def test_a_router_without_layers_or_depth_averaging_has_the_rest(layers, averaging):
    reduced = router(config=tiny_config(router_layers=layers, depth_averaging=averaging))
    h, state = draw(2)
    p, handed_on = jit(lambda router, h, state: router.probabilities(h, state, LOCAL))(reduced, h, state)
    expected, expected_state = reference(reduced, h, state)
    assert_close(p, expected, 1e-5)
    assert_close(handed_on, expected_state, 1e-5)
    hidden = [name for name in ("hidden1", "hidden2", "state_scale") if hasattr(reduced, name)]
    assert hidden == ["hidden1", "hidden2"][: layers - 1] + ["state_scale"] * averaging


def test_skipped_tokens_weigh_nothing():
    h, state = draw(1)
    routing = route(with_bias([0] * E + [3]), h, state)
    assert (routing.expert_bs == E).all()
    assert not np.any(routing.weight_bs)
    real = np.ones(h.shape[:2], bool)
    gradient = jit(jax.grad(lambda h: with_bias([0] * E + [3])(h, state, real, LOCAL).weight_bs.sum()))(h)
    assert not np.any(gradient)


def test_ties_go_to_the_lowest_class():
    h, state = draw(3)
    flat = jax.tree.map(jnp.zeros_like, router())  # all probabilities are 1 / (e + 1)
    assert not np.any(route(flat, h, state).expert_bs)
    leaves, tree = jax.tree.flatten(flat)
    bias = jnp.asarray([-1.0, 0.5, 0.0, 0.5, 0.5])
    tied = jax.tree.unflatten(tree, [bias if x.shape == (E + 1,) else x for x in leaves])
    assert (route(tied, h, state).expert_bs == 1).all()


def test_padding_skips():
    assert (route(router(), *draw(4), False).expert_bs == E).all()


def test_the_loss_does_not_move_the_balancing_bias():
    h, state = draw(4)

    def loss(router):
        out = router(h, state, np.ones(h.shape[:2], bool), LOCAL)
        return out.weight_bs.sum() + (out.state_bsr**2).sum()

    gradient = jit(jax.grad(loss))(with_bias([0.1] * E + [-1]))
    assert not np.any(gradient.balancing_bias[...])
    for name in ("down", "down_bias", "state_scale", "hidden1", "hidden2", "output"):
        assert np.any(getattr(gradient, name)[...]), name


def test_softmax_and_state_are_float32_in_bfloat16():
    h, state = draw(6)
    routing = jax.eval_shape(route, router(), h.astype(jnp.bfloat16), state)
    chex.assert_type([routing.weight_bs, routing.state_bsr], jnp.float32)
    p = probabilities(router(), h.astype(jnp.bfloat16), state)
    chex.assert_type(p, jnp.float32)
    np.testing.assert_allclose(p.sum(-1), 1, rtol=1e-6)
    assert np.abs(np.asarray(p) - reference(router(), h, state)[0]).max() < 0.1


def plainly(projected, state, w, eps, dtype):
    """What `ops.router` computes, in one dtype, by autodiff's own rules."""
    state = projected + w.down_bias_r + state * w.state_scale_r
    x = state / jnp.sqrt((state**2).mean(-1, keepdims=True) + eps) * w.norm_r
    x = jax.nn.gelu(x @ w.hidden1_rr + w.hidden1_bias_r, approximate=False)
    x = jax.nn.gelu(x @ w.hidden2_rr + w.hidden2_bias_r, approximate=False)
    return jax.nn.softmax(x @ w.output_rc, axis=-1), state


@functools.cache
def gradients(function, dtype):
    def weighted(arrays, cotangents):
        out = function(*arrays, 1e-5, dtype)
        return sum((a * b).sum() for a, b in zip(out, cotangents, strict=True))

    return jit(jax.grad(weighted))


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 3e-2)])
@settings(max_examples=3)
@given(seed=seeds())
def test_gradients_are_those_of_autodiff_in_double_precision(dtype, tolerance, seed):
    rng, t, r = np.random.default_rng(seed), 40, 16
    rows, cotangents = rng.normal(size=(2, t, r)), (rng.normal(size=(t, E + 1)), rng.normal(size=(t, r)))
    vectors, matrices = rng.normal(1, 0.3, (5, r)), rng.normal(0, r**-0.5, (2, r, r))
    output, (bias, scale, norm, bias1, bias2) = rng.normal(0, r**-0.5, (r, E + 1)), vectors
    weights = RouterWeights(bias, scale, norm, matrices[0], bias1, matrices[1], bias2, output)
    arrays = jax.tree.map(np.float32, ((*rows, weights), cotangents))
    ours = jax.device_get(gradients(routed, dtype)(*arrays))
    with jax.enable_x64(True):
        exact = jax.device_get(gradients(plainly, jnp.float64)(*jax.tree.map(np.float64, arrays)))
    for mine, theirs in zip(jax.tree.leaves(ours), jax.tree.leaves(exact), strict=True):
        assert np.linalg.norm(np.float64(mine) - theirs) <= tolerance * np.linalg.norm(theirs)
