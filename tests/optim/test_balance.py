"""What the load does to the balancing biases."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import assert_close, jit
from zaya_jax.config import BalanceConfig
from zaya_jax.optim.balance import load_error, make_balancer

START = jnp.asarray([[0.0, 0.0, 0.0, 0.0, -1.0], [0.3, -0.2, 0.1, 0.0, -1.0]])
COUNTS = [[[70, 20, 10, 0, 5], [25, 25, 25, 25, 900]], [[10, 20, 10, 80, 5], [4, 4, 4, 5, 0]],
          [[50, 20, 20, 10, 0], [0, 0, 0, 0, 7]]]  # fmt: skip

ERROR = jit(load_error)


def compiled_error(counts):
    return ERROR(np.asarray(counts, np.int32))


def follow(config, counts=COUNTS):
    balancer = make_balancer(config)
    biases, state = {"bias": START}, balancer.init({"bias": START})
    for each in counts:
        updates, state = balancer.update({"bias": load_error(jnp.asarray(each, jnp.int32))}, state, biases)
        biases = jax.tree.map(jnp.add, biases, updates)
    return np.asarray(biases["bias"])


@given(counts=st.lists(st.lists(st.integers(0, 10**6), min_size=5, max_size=5), min_size=3, max_size=3))
def test_the_load_error_is_the_share_less_the_fair_one(counts):
    counts = np.array(counts)
    counts[:, 0] += 1  # somebody went somewhere
    error = compiled_error(counts)
    chex.assert_type(error, jnp.float32)
    chex.assert_shape(error, counts.shape)
    assert not np.any(error[:, -1]), "skip is not moved"
    np.testing.assert_allclose(error[:, :-1].sum(-1), 0, atol=1e-6)
    real = counts[:, :-1]
    assert_close(error[:, :-1], real / real.sum(-1, keepdims=True) - 1 / 4, 1e-6)


def test_adamw_is_optax_adamw_without_decay():
    config = BalanceConfig(learning_rate=0.01, b1=0.7, b2=0.8, eps=1e-3)
    theirs = optax.adamw(0.01, b1=0.7, b2=0.8, eps=1e-3, weight_decay=0)
    biases, state = START, theirs.init(START)
    for each in COUNTS:
        real = np.asarray(each)[:, :4]
        share = real / np.maximum(real.sum(-1, keepdims=True), 1)
        error = np.where(real.sum(-1, keepdims=True), share - 1 / 4, 0)
        error = jnp.asarray(np.pad(error, ((0, 0), (0, 1))), jnp.float32)
        updates, state = theirs.update(error, state, biases)
        biases = jax.tree.map(jnp.add, biases, updates)
    assert_close(follow(config), biases, 1e-5)


def test_sign_takes_a_step_of_one_size_and_none_where_the_load_is_fair():
    """DeepSeek-V3's rule: b + rate · sign(mean of the counts − count)."""
    expected = np.asarray(START).copy()
    for each in COUNTS:
        real = np.asarray(each)[:, :4]
        expected[:, :4] += 0.01 * np.sign(real.mean(-1, keepdims=True) - real)
    np.testing.assert_allclose(follow(BalanceConfig(rule="sign", learning_rate=0.01)), expected, atol=1e-7)


def test_none_leaves_every_bias():
    np.testing.assert_array_equal(follow(BalanceConfig(rule="none")), START)


@pytest.mark.parametrize("experts", [3, 16, 24, 64])
@pytest.mark.parametrize("fair", [1, 7, 699_050, 1_398_101, 16_777_216])
def test_a_fair_load_has_no_error_however_many_tokens_there_are(experts, fair):
    counts = np.array([[fair] * experts + [99]])  # whatever is skipped
    error = compiled_error(counts)
    assert not np.any(error)
    assert not np.any(compiled_error(counts * ([0] * experts + [1]))), "nor has a layer whose tokens were all skipped"
    one_more = np.asarray(compiled_error(counts + np.eye(1, experts + 1, dtype=int)))
    assert error.shape == one_more.shape
    assert one_more[0, 0] > 0 > one_more[0, 1]
