import functools

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from tests.helpers import jit, seeds
from zaya_jax.ops.orthogonalize import orthogonalize

SHAPES = [(16, 16), (8, 24), (24, 8), (1, 12)]
newton_schulz = functools.cache(lambda dtype, steps=5: jit(functools.partial(orthogonalize, steps=steps, dtype=dtype)))


def conditioned(rng, *shape, low=0.1):
    """Matrices whose singular values lie between `low` and 1, times any factor."""
    u, s, v = np.linalg.svd(rng.normal(size=shape), full_matrices=False)
    s = rng.uniform(low, 1, s.shape)
    return (u * s[..., None, :] @ v * 10.0 ** rng.integers(-3, 4)).astype(np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@given(seed=seeds())
def test_singular_values_come_near_one_and_vectors_stay(shape, dtype, seed):
    m = conditioned(np.random.default_rng(seed), *shape)
    out = np.asarray(newton_schulz(dtype)(m), np.float64)
    assert out.shape == shape
    u, _, v = np.linalg.svd(m.astype(np.float64), full_matrices=False)
    inner = u.T @ out @ v.T  # diagonal, were the singular vectors kept exactly
    assert np.diag(inner).min() > 0.6
    assert np.diag(inner).max() < 1.3
    off = inner - np.diag(np.diag(inner))
    assert np.abs(off).max() < (1e-3 if dtype == jnp.float32 else 0.1)
    values = np.linalg.svd(out, compute_uv=False)
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_one_step_is_the_quintic():
    m = conditioned(np.random.default_rng(0), 5, 9).astype(np.float64)
    x = m / np.linalg.norm(m)
    gram = x @ x.T
    expected = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    np.testing.assert_allclose(newton_schulz(jnp.float32, 1)(m.astype(np.float32)), expected, rtol=1e-4, atol=1e-5)


@given(seed=seeds())
def test_a_stack_is_its_matrices(seed):
    m = conditioned(np.random.default_rng(seed), 2, 3, 8, 24)
    m[1, 2] *= 1e3  # each matrix has its own norm
    out = newton_schulz(jnp.float32)(m)
    for index in np.ndindex(2, 3):
        np.testing.assert_allclose(out[index], newton_schulz(jnp.float32)(m[index]), rtol=1e-4, atol=1e-5)


@given(seed=seeds())
def test_transposing_and_scaling_commute(seed):
    m = conditioned(np.random.default_rng(seed), 8, 24)
    out = newton_schulz(jnp.float32)(m)
    np.testing.assert_allclose(newton_schulz(jnp.float32)(m.T), out.T, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(newton_schulz(jnp.float32)(-1024 * m), -out, rtol=1e-3, atol=1e-3)


def test_a_zero_matrix_stays_zero():
    for dtype in (jnp.float32, jnp.bfloat16):
        out = newton_schulz(dtype)(np.zeros((8, 24), np.float32))
        chex.assert_type(out, jnp.float32)
        assert not np.any(out)
