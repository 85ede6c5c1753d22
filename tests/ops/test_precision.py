import jax.numpy as jnp
import pytest

from zaya_jax.ops.precision import accumulation_dtype


@pytest.mark.parametrize(
    ("dtype", "found"),
    [("bfloat16", "float32"), ("float16", "float32"), ("float32", "float32"), ("float64", "float64")],
)
def test_sums_are_at_least_fp32_and_never_narrower_than_their_terms(dtype, found):
    assert accumulation_dtype(dtype) == accumulation_dtype(jnp.dtype(dtype)) == jnp.dtype(found)
