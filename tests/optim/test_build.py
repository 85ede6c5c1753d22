"""Who is moved by what."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import abstract_model, jit, random_values, tiny_config
from zaya_jax.config import AdamWConfig, BalanceConfig, MuonConfig, OptimizerConfig
from zaya_jax.model import tree
from zaya_jax.model.layers import ROLES
from zaya_jax.optim.build import group_of, load_error, make_balancer, make_optimizer

CONFIG = tiny_config("biased")
ROLES_BY_NAME = tree.roles(abstract_model(CONFIG))
PARAMS = {name: random_values(CONFIG)[name] for name in ROLES_BY_NAME}
OPTIMIZER = OptimizerConfig(
    muon=MuonConfig(learning_rate=0.01, weight_decay=0.3), adamw=AdamWConfig(learning_rate=0.002, weight_decay=0.7)
)
GROUPS = {
    "attention": "muon",
    "router": "muon",
    "expert": "muon",
    "embedding": "adamw",
    "convolution": "adamw",
    "norm": "adamw_no_decay",
    "scale": "adamw_no_decay",
    "temperature": "adamw_no_decay",
    "bias": "adamw_no_decay",
}


@functools.cache
def transform(config=OPTIMIZER):
    optimizer = make_optimizer(config, ROLES_BY_NAME, jnp.float32)
    return optimizer.init, jit(optimizer.update)


def first_update(grads, config=OPTIMIZER):
    init, update = transform(config)
    return update(grads, init(PARAMS), PARAMS)[0]


def gradients(seed=0):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(size=x.shape), jnp.float32) for name, x in PARAMS.items()}


def test_every_role_has_a_group():
    assert {role: group_of(role) for role in ROLES} == GROUPS
    assert set(ROLES_BY_NAME.values()) == set(ROLES), "this model has them all"


def test_the_parameters_of_zaya1_go_where_they_should():
    """zaya1.md §3.1: projections, router and expert matrices to Muon, all else to AdamW."""
    muon = {name.rsplit(".", 1)[-1] for name, role in ROLES_BY_NAME.items() if group_of(role) == "muon"}
    assert muon == {"query", "key", "value_current", "value_delayed", "output", "down", "hidden1", "hidden2", "gate_up"}
    adamw = {name.removeprefix("blocks.0.") for name, role in ROLES_BY_NAME.items() if group_of(role) == "adamw"}
    assert adamw == {"embedding", "attention.depthwise", "attention.grouped"}


def test_decay_acts_where_it_should_and_nowhere_else():
    updates = first_update(jax.tree.map(jnp.zeros_like, PARAMS))
    for name, x in updates.items():
        rate = {"muon": 0.01 * 0.3, "adamw": 0.002 * 0.7, "adamw_no_decay": 0}[GROUPS[ROLES_BY_NAME[name]]]
        np.testing.assert_allclose(x, -rate * PARAMS[name], rtol=1e-5, atol=1e-9, err_msg=name)


def test_each_group_moves_at_its_own_rate_against_the_gradient():
    plain = dataclasses.replace(
        OPTIMIZER,
        muon=dataclasses.replace(OPTIMIZER.muon, weight_decay=0.0),
        adamw=dataclasses.replace(OPTIMIZER.adamw, weight_decay=0.0),
    )
    grads = gradients()
    for name, x in first_update(grads, plain).items():
        if GROUPS[ROLES_BY_NAME[name]] == "muon":
            assert 0.05 * 0.01 < np.sqrt(np.mean(x**2)) < 0.25 * 0.01, name
            assert (x * grads[name]).sum() < 0, name
        else:  # AdamW's first step is the gradient's sign
            np.testing.assert_allclose(x, -0.002 * np.sign(grads[name]), rtol=1e-4, err_msg=name)


def test_decay_adds_to_the_update():
    plain = dataclasses.replace(OPTIMIZER, muon=dataclasses.replace(OPTIMIZER.muon, weight_decay=0.0))
    name, grads = "blocks.0.attention.query", gradients(1)
    difference = first_update(grads)[name] - first_update(grads, plain)[name]
    np.testing.assert_allclose(difference, -0.01 * 0.3 * PARAMS[name], rtol=1e-3, atol=1e-6)


def test_adamw_follows_its_formula_over_steps():
    config = dataclasses.replace(
        OPTIMIZER, adamw=AdamWConfig(learning_rate=1.0, b1=0.5, b2=0.75, eps=1e-3, weight_decay=0)
    )
    init, update = transform(config)
    state, m, v = init(PARAMS), 0.0, 0.0
    for step in range(1, 4):
        grads = gradients(step)
        updates, state = update(grads, state, PARAMS)
        g = np.asarray(grads["input_scale"], np.float64)
        m, v = 0.5 * m + 0.5 * g, 0.75 * v + 0.25 * g**2
        expected = -(m / (1 - 0.5**step)) / (np.sqrt(v / (1 - 0.75**step)) + 1e-3)
        np.testing.assert_allclose(updates["input_scale"], expected, rtol=1e-4)


@given(counts=st.lists(st.lists(st.integers(0, 10**6), min_size=5, max_size=5), min_size=1, max_size=3))
def test_the_load_error_is_the_share_less_the_fair_one(counts):
    counts = np.array(counts)
    counts[:, 0] += 1  # somebody went somewhere
    error = load_error(jnp.asarray(counts, jnp.int32))
    chex.assert_type(error, jnp.float32)
    chex.assert_shape(error, counts.shape)
    assert not np.any(error[:, -1]), "skip is not moved"
    np.testing.assert_allclose(error[:, :-1].sum(-1), 0, atol=1e-6)
    real = counts[:, :-1]
    np.testing.assert_allclose(error[:, :-1], real / real.sum(-1, keepdims=True) - 1 / 4, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("experts", [1, 3, 7, 16])
def test_a_uniform_load_gives_no_error(experts):
    counts = jnp.full((2, experts + 1), 11, jnp.int32).at[:, -1].set(99)  # whatever is skipped
    assert not np.any(load_error(counts))


def test_the_balancing_bias_moves_against_the_load():
    balancer = make_balancer(BalanceConfig(learning_rate=0.01))
    biases = {"bias": jnp.asarray([[0.0, 0.0, 0.0, 0.0, -1.0]])}
    state = balancer.init(biases)
    error = {"bias": load_error(jnp.asarray([[70, 20, 10, 0, 5]], jnp.int32))}
    for _ in range(3):
        updates, state = balancer.update(error, state, biases)
        biases = jax.tree.map(jnp.add, biases, updates)
    moved = np.asarray(biases["bias"][0])
    assert moved[0] < 0
    assert (moved[1:4] > 0).all()
    assert moved[4] == -1, "skip stays where it started, to the bit"
    np.testing.assert_allclose(np.abs(moved[:4]), 0.03, rtol=1e-3)
