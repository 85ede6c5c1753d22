import jax
import jax.numpy as jnp
import pytest

from zaya_jax.ops.operation import Check, Input
from zaya_jax.ops.selfcheck import compare, compare_large

SQUARE = Check(lambda square, x: square(x), (Input((8, 16)),), 1)
ALL = 2**40  # bytes of memory


def square(x):
    return x * x


@pytest.mark.parametrize("wrong", [
    lambda x: x * x * 1.1,
    lambda x: (x * x).at[0, 0].set(jnp.nan),
    lambda x: x * jax.lax.reduce_precision(x, exponent_bits=5, mantissa_bits=10).at[0, 0].set(0),
])  # fmt: skip
def test_a_wrong_result_is_seen(wrong):
    assert compare(SQUARE, "float32", square, square) < 1e-6
    assert not compare(SQUARE, "float32", wrong, square) <= SQUARE.tolerance["float32"]


def test_a_wrong_gradient_is_seen_where_the_result_is_right():
    def stuck(x):
        return jax.lax.stop_gradient(x) * x

    assert compare(SQUARE, "float32", stuck, square) == pytest.approx(0.5)
    assert compare(SQUARE._replace(gradient=False), "float32", stuck, square) < 1e-6


def scaled(x, weights):
    """A row's result, and a sum over rows."""
    return x * weights.sum()


@pytest.mark.parametrize("gradient", [True, False])
def test_many_rows_give_what_few_do_and_sums_over_them_more(gradient):
    check = Check(lambda f, x, w: f(x, w), (Input((8, 16)), Input((4,))), 1, gradient=gradient)
    assert compare_large(check, "float32", scaled, 10_000, ALL) < 1e-5
    totals = Check(lambda f, x, y: f(x, y), (Input((8, 16)), Input((8, 4))), 2, gradient=False)
    assert compare_large(totals, "float32", lambda x, y: x.T @ y, 10_000, ALL) < 1e-5


def test_a_row_that_is_wrong_among_many_is_seen():
    def overflowing(x):
        return jnp.where(jnp.arange(x.shape[0])[:, None] < 100, x * x, 0)

    assert compare_large(SQUARE, "float32", overflowing, 2000, ALL) < 1e-6
    assert compare_large(SQUARE, "float32", overflowing, 10_000, ALL) > 0.1


def test_what_does_not_fit_is_not_tried():
    assert compare_large(SQUARE, "float32", square, 10_000, 1000) is None
    assert compare_large(SQUARE, "float32", square, 2**40, ALL) is None


def compare_where_large_arrays_raise(words):
    def refuse(x):
        if x.shape[0] > 8:
            raise MemoryError(words)
        return x

    check = SQUARE._replace(gradient=False)
    return compare_large(check, "float32", lambda x: jax.pure_callback(refuse, x, x), 10_000, ALL)


@pytest.mark.filterwarnings("ignore")
def test_what_the_allocator_refuses_counts_as_not_tried():
    assert compare_where_large_arrays_raise("Out of memory allocating 1 byte") is None
    with pytest.raises(jax.errors.JaxRuntimeError, match="It is broken"):
        compare_where_large_arrays_raise("It is broken")
