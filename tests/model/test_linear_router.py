"""The router of one matrix: what it chooses, with what weight, and what it leaves alone."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given

from tests.helpers import assert_close, jit, seeds, tiny_config
from zaya_jax.model.linear_router import LinearRouter
from zaya_jax.ops import LOCAL

CONFIG = tiny_config(router="linear")
E = CONFIG.num_experts
SHAPE = (2, 9)
NEUTRAL = [0.0] * E + [-1.0]


@functools.cache
def kernel(seed=0):
    return np.random.default_rng(seed).normal(0, 0.3, (CONFIG.hidden_size, E)).astype(np.float32)


def router(bias, kernel):
    empty = jax.eval_shape(functools.partial(LinearRouter, CONFIG), jax.random.key(0))
    empty.output = empty.output.replace(jnp.asarray(kernel))
    empty.balancing_bias = empty.balancing_bias.replace(jnp.asarray(bias, jnp.float32))
    return empty


def draw(seed):
    rng = np.random.default_rng(seed)
    h = rng.normal(size=(*SHAPE, CONFIG.hidden_size)).astype(np.float32)
    return h, rng.normal(size=(*SHAPE, CONFIG.router_size)).astype(np.float32)


def reference(h):
    z = h.astype(np.float64) @ kernel()
    p = np.exp(z - z.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


route = jit(lambda router, h, state: router(h, state, jnp.ones(h.shape[:2], bool), LOCAL))


@given(seed=seeds())
def test_the_bias_moves_the_choice_and_not_the_weight(seed):
    h, state = draw(seed)
    bias = np.random.default_rng(seed).normal(0, 0.3, E + 1)
    p = reference(h)
    routing = route(router(bias, kernel()), h, state)
    chex.assert_type([routing.expert_bs, routing.weight_bs, routing.state_bsr], [jnp.int32, jnp.float32, jnp.float32])
    np.testing.assert_array_equal(routing.expert_bs, (p + bias[:-1]).argmax(-1))
    weight = np.take_along_axis(p, np.asarray(routing.expert_bs)[..., None], -1)[..., 0]
    assert_close(routing.weight_bs, weight, 1e-5)
    np.testing.assert_array_equal(routing.state_bsr, state)


def test_skip_never_wins_whatever_its_bias():
    h, state = draw(2)
    for bias in ([0] * E + [5], [-7] * E + [-1]):
        assert (route(router(bias, kernel()), h, state).expert_bs < E).all()


def test_ties_go_to_the_lowest_expert():
    h, state = draw(3)
    flat = np.zeros_like(kernel())
    assert not np.any(route(router(NEUTRAL, flat), h, state).expert_bs)
    assert (route(router([-1, 0.5, 0, 0.5, -1], flat), h, state).expert_bs == 1).all()


def test_the_loss_moves_the_matrix_and_the_input_and_not_the_bias():
    h, state = draw(4)
    loss = jit(
        jax.grad(lambda router, h: router(h, state, jnp.ones(h.shape[:2], bool), LOCAL).weight_bs.sum(), argnums=(0, 1))
    )
    of_router, of_h = loss(router([0.1] * E + [-1], kernel()), h)
    assert not np.any(of_router.balancing_bias[...])
    assert (np.abs(of_router.output[...]).max(0) > 0).all()
    assert (np.abs(of_h).max(-1) > 0).all()


def test_the_softmax_is_float32_in_bfloat16():
    low = jit(lambda router, h: router.probabilities(h))(router(NEUTRAL, kernel()), draw(5)[0].astype(jnp.bfloat16))
    chex.assert_type(low, jnp.float32)
    np.testing.assert_allclose(low.sum(-1), 1, rtol=1e-6)
    assert np.abs(low - reference(draw(5)[0])).max() < 0.05


def test_it_starts_neutral():
    fresh = LinearRouter(CONFIG, jax.random.key(0))
    np.testing.assert_array_equal(fresh.balancing_bias[...], NEUTRAL)
    chex.assert_shape(fresh.output[...], (CONFIG.hidden_size, E))
