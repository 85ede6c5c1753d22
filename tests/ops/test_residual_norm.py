import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zaya_jax.ops.norm import rms_norm
from zaya_jax.ops.residual_norm import MergeVectors, merge, residual_norm


def drawn(output, stream=np.float32):
    rng = np.random.default_rng(0)
    vectors = MergeVectors(*rng.normal(0, 1, (4, 24)).astype(np.float32))
    o, x = rng.normal(0, 3, (2, 2, 3, 24)).astype(np.float32)
    weight = rng.uniform(0.5, 1.5, 24).astype(np.float32)
    return jnp.asarray(o, output), jnp.asarray(x, stream), MergeVectors(*map(jnp.asarray, vectors)), jnp.asarray(weight)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("scaled", [True, False])
def test_it_is_the_merge_and_the_norm_one_after_the_other_to_the_last_bit(dtype, scaled):
    o, x, vectors, weight = drawn(dtype)
    expected = np.asarray(o, np.float32) + np.asarray(x)
    if scaled:
        v = MergeVectors(*map(np.asarray, vectors))
        expected = (np.asarray(o, np.float32) + v.hidden_bias_d) * v.hidden_scale_d
        expected = expected + (np.asarray(x) + v.residual_bias_d) * v.residual_scale_d
    new, normed = residual_norm(o, x, vectors if scaled else None, weight, 1e-5, dtype)
    np.testing.assert_array_equal(new, expected)
    np.testing.assert_array_equal(new, merge(o, x, vectors if scaled else None))
    np.testing.assert_array_equal(normed, rms_norm(new, weight, 1e-5, dtype))
    chex.assert_type([new, normed], [jnp.float32, dtype])


def test_vectors_of_low_precision_act_in_that_of_the_stream():
    o, x, vectors, _ = drawn(jnp.bfloat16)
    low = MergeVectors(*(vector.astype(jnp.bfloat16) for vector in vectors))
    again = MergeVectors(*(vector.astype(jnp.float32) for vector in low))
    np.testing.assert_array_equal(merge(o, x, low), merge(o, x, again))


def test_a_run_in_double_precision_is_so_throughout():
    with jax.enable_x64(True):
        o, x, vectors, weight = drawn(jnp.float64, jnp.float64)
        new, normed = residual_norm(o, x, vectors, weight, 1e-5, jnp.float64)
        chex.assert_type([new, normed], jnp.float64)
        np.testing.assert_allclose(
            normed, weight * new / np.sqrt((np.asarray(new) ** 2).mean(-1, keepdims=True) + 1e-5), rtol=1e-12
        )
