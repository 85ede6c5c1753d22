"""Both grouped products against one product a row, whatever the split."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import assert_close, jit, seeds
from zaya_jax.ops import grouped_matmul as grouped_matmul_file
from zaya_jax.ops.grouped_matmul import ONE_SIZE, grouped_matmul

BLOCKS = grouped_matmul_file.ROW_BLOCKS  # of the product; tests of this folder have smaller ones
T, P, Q, E = 29, 6, 10, 4


@functools.cache
def compiled():
    def call(x, w, sizes, cotangent):
        out, back = jax.vjp(lambda x, w: grouped_matmul(x, w, sizes), x, w)
        return out, *back(cotangent)

    return jit(call)


@st.composite
def splits(draw):
    """Rows of each group: any, many groups empty, all rows one group's, none at all."""
    cuts = sorted(draw(st.lists(st.sampled_from([0, 1, 7, 8, 9, 16, 20, T]), min_size=E, max_size=E)))
    return np.diff([0, *cuts]).astype(np.int32)


def dense(x, w, sizes, cotangent):
    """float64 product, and both gradients, row by row."""
    x, w, cotangent = (np.asarray(a, np.float64) for a in (x, w, cotangent))
    out, dx, dw = np.zeros((T, Q)), np.zeros_like(x), np.zeros_like(w)
    for row, e in enumerate(np.repeat(np.arange(E), sizes)):
        out[row] = x[row] @ w[e]
        dx[row] = w[e] @ cotangent[row]
        dw[e] += np.outer(x[row], cotangent[row])
    return out, dx, dw


def draw(seed, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.normal(size=shape), dtype) for shape in ((T, P), (E, P, Q), (T, Q)))


@given(sizes=splits(), seed=seeds())
def test_each_row_meets_its_own_matrix(sizes, seed):
    x, w, cotangent = draw(seed)
    ours = compiled()(x, w, sizes, cotangent)
    assert_close(ours, dense(x, w, sizes, cotangent), 1e-5, least=1.0)
    ours = jax.device_get(ours)
    for array in ours[:2]:
        assert not np.any(array[sizes.sum() :]), "rows past the groups are zero, and so is their gradient"
    for e in np.flatnonzero(sizes == 0):
        assert not np.any(ours[2][e]), "a matrix no row meets has no gradient"


@pytest.mark.parametrize("sizes", [[0] * 4, [T, 0, 0, 0], [0, 0, 0, T], [8, 8, 8, 5], [0, 9, 0, 20], [1, 1, 1, 1]])
def test_splits_at_the_edges(sizes):
    x, w, cotangent = draw(1)
    sizes = np.array(sizes, np.int32)
    ours = compiled()(x, w, sizes, cotangent)
    assert_close(ours, dense(x, w, sizes, cotangent), 1e-5, least=1.0)


def test_rows_past_the_groups_may_hold_anything():
    x, w, cotangent = draw(2)
    sizes = np.array([3, 0, 9, 5], np.int32)
    clean = compiled()(x, w, sizes, cotangent)
    x, cotangent = (np.concatenate([a[:17], np.full_like(a[17:], 1e30)]) for a in map(np.asarray, (x, cotangent)))
    chex.assert_trees_all_close(compiled()(x, w, sizes, cotangent), clean, rtol=1e-6)


def test_bfloat16_is_summed_in_float32():
    x, w, cotangent = draw(3, jnp.bfloat16)
    sizes = np.array([9, 0, 11, 6], np.int32)
    ours = compiled()(x, w, sizes, cotangent)
    chex.assert_type(list(ours), jnp.bfloat16)
    for array, want in zip(ours, dense(x, w, sizes, cotangent), strict=True):
        np.testing.assert_allclose(np.asarray(array, np.float64), want, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("rows", [3, 29, 256, 257, 512, 513, 2000])
def test_blocks_cover_each_row_once_and_the_rest_of_a_group_is_one(rows, monkeypatch):
    monkeypatch.setattr(grouped_matmul_file, "ROW_BLOCKS", BLOCKS)
    blocks = grouped_matmul_file._covering_blocks(rows)

    def count(carry, group, first, inside):
        covered, calls = carry
        place = first + jnp.arange(len(inside))
        return covered.at[place].add(inside), calls.at[group].add(1)

    @jax.jit
    def run(groups):
        start = jnp.zeros(rows, jnp.int32), jnp.zeros_like(groups)
        return grouped_matmul_file._over_blocks(count, start, groups, rows, blocks)

    draw = np.random.default_rng(rows)
    for split in [draw.multinomial(rows, draw.dirichlet([0.3] * 6)) for _ in range(20)]:
        covered, calls = jax.device_get(run(jnp.asarray(split[:5], jnp.int32)))
        np.testing.assert_array_equal(covered, np.arange(rows) < split[:5].sum())
        np.testing.assert_array_equal(calls, -(-split[:5] // min(blocks[0][0], rows)))


def test_a_row_of_a_few_is_bitwise_independent_of_those_that_share_its_matrix(monkeypatch):
    """Rows of a decode step belong to different requests; the rows here are as many as an engine can have on a CPU."""
    monkeypatch.setattr(grouped_matmul_file, "ROW_BLOCKS", BLOCKS)
    draw = np.random.default_rng(0)
    x, w = draw.normal(size=(ONE_SIZE, 384)).astype(np.float32), draw.normal(size=(2, 384, 384)).astype(np.float32)
    product = jax.jit(grouped_matmul)
    with_others = np.asarray(product(x, w, np.array([0, ONE_SIZE], np.int32)))
    for count in (1, 15, 40, 100):
        moved = np.roll(x, -count, 0)  # these rows are the last ones, alone with their matrix
        out = np.asarray(product(moved, w, np.array([ONE_SIZE - count, count], np.int32)))
        np.testing.assert_array_equal(out[-count:], with_others[:count])


def test_fewer_rows_than_the_smallest_block():
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(3, P)).astype(np.float32), rng.normal(size=(2, P, Q)).astype(np.float32)
    out = jax.jit(grouped_matmul)(x, w, np.array([1, 1], np.int32))
    assert_close(out, [x[0] @ w[0], x[1] @ w[1], np.zeros(Q)], 1e-5)
