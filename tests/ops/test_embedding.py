import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.ops.embedding import add_rows, embed

compiled = jax.jit(add_rows)


@pytest.mark.parametrize("n", [1, 21])
@given(different=st.integers(1, 9), seed=st.integers(0, 2**32 - 1))
def test_rows_of_equal_tokens_are_all_added(n, different, seed):
    rng = np.random.default_rng(seed)
    tokens_n = rng.integers(0, different, n).astype(np.int32)
    table_vd, rows_nd = (rng.integers(-99, 99, (size, 2)).astype(np.float32) for size in (9, n))  # sums are exact
    expected_vd = table_vd.copy()
    np.add.at(expected_vd, tokens_n, rows_nd)
    np.testing.assert_array_equal(compiled(table_vd, tokens_n, rows_nd), expected_vd)


def test_the_sum_of_many_rows_is_nearly_that_in_double_precision():
    """A token that is half of a batch: the tree loses no more than its depth, where a sum one by one loses much."""
    rng = np.random.default_rng(0)
    rows_nd = rng.normal(1, 1, (1 << 14, 2)).astype(np.float32)
    tokens_n = rng.integers(0, 2, 1 << 14)
    found_vd = compiled(np.zeros((3, 2), np.float32), tokens_n, rows_nd)
    expected_vd = np.zeros((3, 2))
    np.add.at(expected_vd, tokens_n, rows_nd.astype(np.float64))
    np.testing.assert_allclose(found_vd, expected_vd, rtol=14 * 2**-24)


def test_the_lookup_and_its_gradient_are_those_of_take():
    rng = np.random.default_rng(0)
    table_vd = jnp.asarray(rng.normal(size=(7, 4)), jnp.float32)
    tokens_bs = jnp.asarray(rng.integers(-2, 9, (3, 5)), jnp.int32)  # some outside of the table
    weight_bsd = jnp.asarray(rng.integers(-9, 9, (3, 5, 4)), jnp.float32)

    def take(table, tokens):
        return jnp.take(table, tokens, axis=0, mode="clip")

    np.testing.assert_array_equal(embed(table_vd, tokens_bs), take(table_vd, tokens_bs))
    found, expected = (jax.grad(lambda table, f=f: (f(table, tokens_bs) * weight_bsd).sum())(table_vd)
                       for f in (embed, take))  # fmt: skip
    np.testing.assert_array_equal(found, expected)
