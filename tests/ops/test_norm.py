import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from tests.helpers import seeds
from zaya_jax.ops.norm import rms_norm


@given(seed=seeds())
def test_rows_have_the_root_mean_square_of_their_weight(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(0, 10.0 ** rng.integers(-2, 4), (3, 5, 16)).astype(np.float32)
    weight = rng.uniform(-2, 2, 16).astype(np.float32)
    out = rms_norm(x, weight, 1e-5, jnp.float32)
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
    out = rms_norm(x, weight, 1e-5, jnp.bfloat16)
    chex.assert_type(out, jnp.bfloat16)
    low = np.asarray(x.astype(jnp.bfloat16), np.float32)
    normed = jnp.asarray(low / np.sqrt((low**2).mean(-1, keepdims=True) + 1e-5), jnp.bfloat16)
    np.testing.assert_array_equal(out, weight.astype(jnp.bfloat16) * normed)


def test_statistics_do_not_overflow_in_low_precision():
    x = jnp.full((1, 8), 2.0**70, jnp.bfloat16)  # its square is beyond what bfloat16's sums keep exactly
    np.testing.assert_allclose(rms_norm(x / 2.0**10, jnp.ones(8), 1e-5, jnp.bfloat16).astype(jnp.float32), 1, rtol=1e-2)
    many = jnp.ones((1, 4096), jnp.bfloat16).at[0, 0].set(0)  # a bfloat16 sum of ones stops at 256
    np.testing.assert_allclose(
        rms_norm(many, jnp.ones(4096), 1e-5, jnp.bfloat16)[0, 1].astype(jnp.float32), 1, rtol=1e-2
    )
