"""The pass over momentum: kernel against double precision, what a skipped step leaves, its bytes and its code."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import assert_close, jit, seeds
from tests.kernel_helpers import TARGETS, equations, kernel, lowered_kernels, shape
from zaya_jax.config import MuonConfig
from zaya_jax.ops.momentum import momentum_numbers, step_momentum
from zaya_jax.optim.muon import momentum_coefficients

BOTH = (jnp.float32, jnp.bfloat16)
# A tile has 64 elements here: less than one, and almost two.
SIZES = [(5,), (2, 7, 9)]
FORMS = st.sampled_from([("sum", False), ("sum", True), ("ema", False), ("ema", True)])
# Of a layer; of all 40 layers, whose addresses want 64 bits; of the same over 1,024 devices; and no power of two.
EXPERTS, ALL_EXPERTS, SHARE, ODD = (16, 2048, 4096), (640, 2048, 4096), (640, 2, 4096), (40, 257, 17)


def step(platform, dtype, *arrays):
    return kernel("momentum", platform)(*arrays, dtype)


@functools.cache
def compiled(platform, dtype):
    return jit(functools.partial(step, platform, dtype))


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


def arrays_of(sizes, given):
    """Shapes of gradient, momentum and numbers."""
    return shape(*sizes, dtype=given), shape(*sizes, dtype=jnp.float32), shape(6, dtype=jnp.float32)


def with_platform(dtype):
    return lambda *arrays, platform: step(platform, dtype, *arrays)


@pytest.mark.parametrize(
    ("platform", "given_in", "dtype"),
    [("cpu", jnp.bfloat16, jnp.float32), ("interpret", jnp.float32, jnp.bfloat16)],
)
@settings(max_examples=8)
@given(sizes=st.sampled_from(SIZES), form=FORMS, factor=st.floats(0.01, 2), seed=seeds())
def test_it_is_the_formula(platform, given_in, dtype, sizes, form, factor, seed):
    gradient, momentum = draw(seed, sizes, given_in)
    numbers = coefficients(*form)
    numbers_there = pack_numbers(tuple(numbers), factor, False)
    new, direction = compiled(platform, dtype)(gradient, momentum, numbers_there)
    chex.assert_shape([new, direction], sizes)
    chex.assert_type([new, direction], [jnp.float32, dtype])
    expected = formula(gradient, momentum, np.float32(factor), numbers)
    np.testing.assert_allclose(new, expected[0], rtol=1e-6, atol=2e-6)
    rounding = 2.0**-8 if dtype == jnp.bfloat16 else 1e-6
    np.testing.assert_allclose(np.asarray(direction, np.float64), expected[1], rtol=rounding, atol=2e-6)


@pytest.mark.parametrize("platform", ["cpu", "interpret"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_skipped_step_leaves_the_momentum_bit_for_bit(platform, value):
    gradient, momentum = map(np.array, draw(0, (2, 7, 9), jnp.float32))
    gradient[0], momentum[1, 0] = value, -0.0
    for factor, skip in ((0.5, True), (np.nan, True), (0.5, False)):
        numbers = pack_numbers(tuple(coefficients("sum", nesterov=True)), factor, skip)
        new, _ = compiled(platform, jnp.bfloat16)(gradient, momentum, numbers)
        assert (np.asarray(new).tobytes() == np.asarray(momentum).tobytes()) == skip


def test_the_kernel_takes_the_memory_of_the_momentum():
    found = equations(functools.partial(step, "cuda", jnp.bfloat16), *arrays_of(EXPERTS, jnp.float32))
    (call,) = [one for one in found if one.primitive.name == "pallas_call"]
    assert tuple(call.params["input_output_aliases"]) == ((1, 0),)


@pytest.mark.parametrize(
    ("given_in", "dtype", "element"),
    [(jnp.float32, jnp.bfloat16, 14), (jnp.bfloat16, jnp.float32, 14), (jnp.float32, jnp.float32, 16)],
)
def test_each_byte_is_moved_once(given_in, dtype, element):
    found = equations(functools.partial(step, "rocm", dtype), *arrays_of((3, 64, 1024), given_in))
    (call,) = [one for one in found if one.primitive.name == "pallas_call"]
    (programs,) = call.params["grid_mapping"].grid
    moved = [one.outvars[0].aval for one in call.params["jaxpr"].eqns if one.primitive.name.startswith("masked_")]
    assert programs * sum(x.size * x.dtype.itemsize for x in moved) == element * 3 * 64 * 1024


@pytest.mark.parametrize("platform", TARGETS)
def test_the_kernel_is_lowered(platform):
    for sizes in (ALL_EXPERTS, ODD):
        names = lowered_kernels(with_platform(jnp.bfloat16), *arrays_of(sizes, jnp.float32), platform=platform)
        assert names == ["momentum"]


def test_other_dtypes_are_refused():
    x, half = np.ones((4, 4), np.float32), np.ones((4, 4), np.float16)
    with pytest.raises(ValueError, match="not float16 and float32, with momentum in float32"):
        step("interpret", jnp.float32, half, x, np.ones(6, np.float32))
    with pytest.raises(ValueError, match="not float32 and float16, with momentum in float32"):
        step("interpret", jnp.float16, x, x, np.ones(6, np.float32))
    with jax.enable_x64(True), pytest.raises(ValueError, match=r"float64 and float64, with momentum in float64\.$"):
        step("interpret", jnp.float64, *(np.ones((4, 4)),) * 2, np.ones(6))


def test_double_precision_stays_such_by_the_reference():
    gradient, momentum = (np.random.default_rng(seed).normal(size=(3, 5)) for seed in range(2))
    numbers = coefficients("ema", nesterov=True)
    with jax.enable_x64(True):
        found = step_momentum(jnp.asarray(gradient), jnp.asarray(momentum),
                              momentum_numbers(tuple(numbers), 0.3, False, jnp.float64), jnp.float64)  # fmt: skip
    for one, expected in zip(found, formula(gradient, momentum, 0.3, numbers), strict=True):
        assert_close(one, expected, 1e-14)
