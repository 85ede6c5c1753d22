"""The pass over momentum: against double precision, and what a skipped step leaves."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import assert_close, jit, seeds
from zaya_jax.config import MuonConfig
from zaya_jax.ops.momentum import momentum_numbers, step_momentum
from zaya_jax.optim.muon import momentum_coefficients

SIZES = [(5,), (2, 7, 9)]
FORMS = st.sampled_from([("sum", False), ("sum", True), ("ema", False), ("ema", True)])


@functools.cache
def compiled(dtype):
    return jit(functools.partial(step_momentum, dtype=dtype))


def draw(seed, sizes, dtype):
    rng = np.random.default_rng(seed)
    return jnp.asarray(rng.normal(size=sizes), dtype), jnp.asarray(rng.normal(size=sizes), jnp.float32)


jitted_coefficients = jax.jit(momentum_coefficients, static_argnums=0)


def coefficients(form, nesterov, steps=3):
    config = MuonConfig(momentum=0.9, momentum_form=form, nesterov=nesterov)
    return [float(one) for one in jitted_coefficients(config, np.int32(steps))]


pack_numbers = jax.jit(functools.partial(momentum_numbers, dtype=jnp.float32))


def formula(gradient, momentum, factor, numbers):
    """In float64: the new momentum and the direction."""
    a, b, c, d = numbers
    gradient = factor * np.asarray(gradient, np.float64)
    new = a * np.asarray(momentum, np.float64) + b * gradient
    return new, c * new + d * gradient


@pytest.mark.parametrize(("given_in", "dtype"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)])
@settings(max_examples=8)
@given(sizes=st.sampled_from(SIZES), form=FORMS, factor=st.floats(0.01, 2), seed=seeds())
def test_it_is_the_formula(given_in, dtype, sizes, form, factor, seed):
    gradient, momentum = draw(seed, sizes, given_in)
    numbers = coefficients(*form)
    numbers_there = pack_numbers(tuple(numbers), factor, False)
    new, direction = compiled(dtype)(gradient, momentum, numbers_there)
    chex.assert_shape([new, direction], sizes)
    chex.assert_type([new, direction], [jnp.float32, dtype])
    expected = formula(gradient, momentum, np.float32(factor), numbers)
    np.testing.assert_allclose(new, expected[0], rtol=1e-6, atol=2e-6)
    rounding = 2.0**-8 if dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(np.asarray(direction, np.float64), expected[1], rtol=rounding, atol=2e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_skipped_step_leaves_the_momentum_bit_for_bit(value):
    gradient, momentum = map(np.array, draw(0, (2, 7, 9), jnp.float32))
    gradient[0], momentum[1, 0] = value, -0.0
    for factor, skip in ((0.5, True), (np.nan, True), (0.5, False)):
        numbers = pack_numbers(tuple(coefficients("sum", nesterov=True)), factor, skip)
        new, _ = compiled(jnp.bfloat16)(gradient, momentum, numbers)
        assert (np.asarray(new).tobytes() == np.asarray(momentum).tobytes()) == skip


def test_double_precision_stays_such_by_the_reference():
    gradient, momentum = (np.random.default_rng(seed).normal(size=(3, 5)) for seed in range(2))
    numbers = coefficients("ema", nesterov=True)
    with jax.enable_x64(True):
        found = step_momentum(jnp.asarray(gradient), jnp.asarray(momentum),
                              momentum_numbers(tuple(numbers), 0.3, False, jnp.float64), jnp.float64)  # fmt: skip
    for one, expected in zip(found, formula(gradient, momentum, 0.3, numbers), strict=True):
        assert_close(one, expected, 1e-14)
