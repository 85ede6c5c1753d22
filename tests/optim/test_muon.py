"""Muon against its formula, and against optax's where both mean the same."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given

from tests.helpers import jit, seeds
from zaya_jax.ops.orthogonalize import orthogonalize
from zaya_jax.optim.muon import scale_by_muon


def muon(momentum=0.9, nesterov=True, dtype=jnp.float32):
    transform = scale_by_muon(momentum, nesterov=nesterov, steps=5, dtype=dtype)
    return transform.init, jit(transform.update)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_is_the_sum_and_nesterov_looks_ahead(nesterov):
    init, update = muon(0.5, nesterov)
    grads = [{"a": draw(seed, 6, 10), "b": draw(9 + seed, 2, 3, 8, 4)} for seed in range(3)]
    state = init(grads[0])
    assert not any(np.any(x) for x in jax.tree.leaves(state))
    expected = jax.tree.map(jnp.zeros_like, grads[0])
    for grad in grads:
        out, state = update(grad, state)
        expected = jax.tree.map(lambda m, g: 0.5 * m + g, expected, grad)
        chex.assert_trees_all_close(state.momentum, expected, rtol=1e-5, atol=1e-6)
        ahead = jax.tree.map(lambda m, g: g + 0.5 * m if nesterov else m, expected, grad)
        for name, m in ahead.items():
            direction = 0.2 * max(m.shape[-2:]) ** 0.5 * orthogonalize(m, steps=5, dtype=jnp.float32)
            np.testing.assert_allclose(out[name], direction, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shape", [(32, 32), (24, 32), (2, 3, 32, 32)])
@given(seed=seeds())
def test_an_update_has_the_root_mean_square_of_adamw(shape, seed):
    init, update = muon()
    u, _, v = np.linalg.svd(np.asarray(draw(seed, *shape)), full_matrices=False)
    s = np.random.default_rng(seed).uniform(0.2, 1, u.shape[-1])
    grad = {"w": jnp.asarray(1e-4 * (u * s) @ v, jnp.float32)}
    out, _ = update(grad, init(grad))
    rms = float(jnp.sqrt(jnp.mean(out["w"] ** 2)))
    # An orthogonal p × q matrix has the RMS 1/√max(p, q); Newton–Schulz stops between 0.7 and 1.2 of that.
    assert 0.2 * 0.7 < rms < 0.2 * 1.2


def test_a_stack_is_a_batch_of_matrices():
    init, update = muon()
    grad = {"w": draw(0, 2, 3, 8, 5) * np.array([1, 10, 100, 0.1, 1, 7], np.float32).reshape(2, 3, 1, 1)}
    out, _ = update(grad, init(grad))
    for index in np.ndindex(2, 3):
        alone = {"w": grad["w"][index]}
        np.testing.assert_allclose(out["w"][index], update(alone, init(alone))[0]["w"], rtol=1e-3, atol=1e-5)


@given(seed=seeds())
def test_the_first_direction_is_optax_muons(seed):
    """Of one gradient, the sum form and optax's average differ by a factor, which the norm takes out."""
    grad = {"w": draw(seed, 12, 12), "tall": draw(seed + 1, 20, 6), "wide": draw(seed + 2, 6, 20)}
    init, update = muon(0.95)
    ours, _ = update(grad, init(grad))
    theirs = optax.contrib.scale_by_muon(ns_steps=5, beta=0.95, nesterov=True)
    for name, x in grad.items():
        x, _ = theirs.update(x, theirs.init(x))  # noqa: PLW2901
        np.testing.assert_allclose(ours[name] / jnp.linalg.norm(ours[name]), x / jnp.linalg.norm(x), atol=2e-3)


def test_state_is_float32_for_gradients_in_bfloat16():
    init, update = muon(dtype=jnp.bfloat16)
    grad = {"w": draw(0, 8, 8).astype(jnp.bfloat16)}
    state = init(grad)
    out, state = update(grad, state)
    chex.assert_type([state.momentum["w"], out["w"]], jnp.float32)
    exact, _ = muon()[1]({"w": grad["w"].astype(jnp.float32)}, init(grad))
    assert np.linalg.norm(out["w"] - exact["w"]) < 0.05 * np.linalg.norm(exact["w"])


def test_a_zero_gradient_gives_a_zero_update():
    init, update = muon()
    grad = {"w": jnp.zeros((4, 6))}
    assert not np.any(update(grad, init(grad))[0]["w"])
