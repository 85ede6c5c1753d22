import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from tests.helpers import seeds
from zaya_jax.ops.norm import rms_norm

compiled = jax.jit(rms_norm, static_argnums=(2, 3))


@given(seed=seeds())
def test_rows_have_the_root_mean_square_of_their_weight(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 10.0 ** rng.integers(-2, 4), (3, 5, 16)).astype(np.float32)
    weight = rng.uniform(-2, 2, 16).astype(np.float32)
    out = compiled(x, weight, 1e-5, jnp.float32)
    wide = x.astype(np.float64)
    expected = weight * wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_epsilon_stands_inside_the_root():
    np.testing.assert_allclose(rms_norm(np.full((1, 4), 3e-3, np.float32), np.ones(4), 1e-5, jnp.float32),
                               3e-3 / np.sqrt(9e-6 + 1e-5), rtol=1e-5)  # fmt: skip
    assert not np.any(rms_norm(np.zeros((1, 4), np.float32), np.ones(4), 1e-5, jnp.float32))


@pytest.mark.parametrize("stream", [jnp.float32, jnp.bfloat16])
def test_bfloat16_rounds_where_the_reference_does(stream):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(0, 3, (4, 16)), stream)
    weight = jnp.asarray(rng.uniform(0.5, 1.5, 16), jnp.float32)
    out = compiled(x, weight, 1e-5, jnp.bfloat16)
    chex.assert_type(out, jnp.bfloat16)
    low = np.asarray(np.asarray(x, jnp.bfloat16), np.float32)
    normed = (low / np.sqrt((low**2).mean(-1, keepdims=True) + 1e-5)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(out, np.asarray(weight, jnp.bfloat16) * normed)


def test_statistics_do_not_overflow_in_low_precision():
    x = np.ones((2, 4096), jnp.bfloat16)
    x[0] *= x.dtype.type(2.0**50)  # its square is beyond what bfloat16's sums keep exactly
    x[1, 0] = 0  # a bfloat16 sum of ones stops at 256
    out = np.asarray(compiled(x, np.ones(4096, np.float32), 1e-5, jnp.bfloat16), np.float32)
    np.testing.assert_allclose(out[:, 1], 1, rtol=1e-2)
