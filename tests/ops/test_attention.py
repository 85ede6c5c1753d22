"""The blockwise attention equals a dense softmax, and holds no square of the sequence."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import assert_close, blocks_of, jit, packed_rows, seeds
from zaya_jax.ops.attention import attention


def dense(q, k, v, query_segments, key_segments, offset, window):
    """Softmax over all visible keys at once; a query that sees none gets zero."""
    groups = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, groups, 2), jnp.repeat(v, groups, 2)
    scores = jnp.einsum("bshc,bthc->bhst", q, k) / np.sqrt(q.shape[-1])
    query, key = offset + jnp.arange(q.shape[1])[:, None], jnp.arange(k.shape[1])
    seen = key <= query
    if window is not None:
        seen &= query - key < window
    seen = seen & (query_segments[:, :, None] == key_segments[:, None]) & (query_segments[:, :, None] > 0)
    seen = seen[:, None]
    p = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
    return jnp.einsum("bhst,bthc->bshc", jnp.where(seen, p, 0), v)


# (queries, keys, query heads, key heads, window): lengths on and off the blocks of 8, all ratios, decode's shapes
SHAPES = {
    "one_block": (5, 5, 2, 2, None),
    "ragged": (19, 19, 4, 2, None),
    "window": (24, 24, 3, 1, 5),
    "window_over_blocks": (27, 27, 2, 1, 11),
    "window_of_one": (17, 17, 2, 2, 1),
    "more_keys": (6, 29, 4, 1, None),
    "more_keys_window": (9, 26, 2, 1, 11),
    "one_query": (1, 21, 4, 2, None),
}


@functools.cache
def compiled(function, window):
    def call(q, k, v, query_segments, key_segments, offset, cotangent):
        out, back = jax.vjp(lambda q, k, v: function(q, k, v, query_segments, key_segments, offset, window), q, k, v)
        return out, back(cotangent)

    return jit(call)


def ours(q, k, v, query_segments, key_segments, offset, window):
    return attention(q, k, v, query_segments_bs=query_segments, key_segments_bt=key_segments, query_offset=offset,
                     window=window)  # fmt: skip


def draw(seed, s, t, h, k, dtype=np.float32):
    rng = np.random.default_rng(seed)
    shapes = ((2, s, h, 8), (2, t, k, 8), (2, t, k, 8), (2, s, h, 8))
    q, key, v, cotangent = (jnp.asarray(rng.normal(0, 2, shape), dtype) for shape in shapes)
    return q, key, v, cotangent


# Each is compiled twice: those that have most in them, the others in `make soak`.
QUICK = ("ragged", "more_keys_window", "one_query")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.soak) for name in SHAPES]
)
@given(data=st.data(), seed=seeds())
def test_equals_a_dense_softmax(name, data, seed):
    s, t, h, k, window = SHAPES[name]
    q, key, v, cotangent = draw(seed, s, t, h, k)
    key_segments = data.draw(packed_rows(2, t))
    offset = data.draw(st.integers(0, t - s))
    query_segments = key_segments[:, offset : offset + s]
    key_segments = key_segments.copy()
    key_segments[:, offset + s :] = 0  # not yet written
    arguments = (q, key, v, query_segments, key_segments, offset, cotangent)
    out, gradients = compiled(ours, window)(*arguments)
    expected, expected_gradients = compiled(dense, window)(*arguments)
    assert_close(out, expected, 1e-5)
    assert_close(gradients, expected_gradients, 1e-5, least=1.0)
    assert not np.any(np.asarray(out)[query_segments == 0]), "padding attends to nothing"
    assert not np.any(np.asarray(gradients[0])[query_segments == 0])
    assert not np.any(np.asarray(gradients[1])[key_segments == 0])
    assert not np.any(np.asarray(gradients[2])[key_segments == 0])


def test_without_segments_a_row_is_one_document():
    q, k, v, cotangent = draw(0, 19, 19, 4, 2)
    ones = np.ones((2, 19), np.int32)
    expected, _ = compiled(dense, None)(q, k, v, ones, ones, 0, cotangent)
    assert_close(jit(attention)(q, k, v), expected, 1e-5)


@pytest.mark.parametrize("scale", [60.0, 1e-20])
def test_large_and_small_scores_stay_finite(scale):
    q, k, v, cotangent = draw(1, 19, 19, 4, 2)
    ones = np.ones((2, 19), np.int32)
    arguments = (q * scale, k, v, ones, ones, 0, cotangent)
    out, gradients = compiled(ours, None)(*arguments)
    expected, expected_gradients = compiled(dense, None)(*arguments)
    chex.assert_tree_all_finite((out, gradients))
    assert_close(out, expected, 1e-4)
    assert_close(gradients, expected_gradients, 1e-4)


def test_bfloat16_keeps_its_dtype_and_sums_in_float32():
    q, k, v, cotangent = draw(2, 19, 19, 4, 2, jnp.bfloat16)
    ones = np.ones((2, 19), np.int32)
    out, gradients = compiled(ours, None)(q, k, v, ones, ones, 0, cotangent)
    chex.assert_type([out, *gradients], jnp.bfloat16)
    *wide, cotangent = (np.asarray(x, np.float32) for x in (q, k, v, cotangent))
    expected, expected_gradients = compiled(dense, None)(*wide, ones, ones, 0, cotangent)
    assert_close(np.asarray(out, np.float32), expected, 0.02)
    for x, want in zip(gradients, expected_gradients, strict=True):
        error = np.linalg.norm(np.asarray(x, np.float32) - want) / np.linalg.norm(want)
        assert error < 0.02


def test_memory_is_linear_in_the_sequence():
    def loss(q, k, v, segments):
        return attention(q, k, v, query_segments_bs=segments, key_segments_bt=segments).sum()

    with blocks_of(128):
        bytes_ = []
        for s in (2048, 4096):
            shapes = [jax.ShapeDtypeStruct((1, s, heads, 16), jnp.float32) for heads in (2, 1, 1)]
            segments = jax.ShapeDtypeStruct((1, s), jnp.int32)
            compiled = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(*shapes, segments).compile()
            bytes_.append(compiled.memory_analysis().temp_size_in_bytes)
    assert 0 < bytes_[1] <= 2.2 * bytes_[0], bytes_
    assert bytes_[1] < 4096 * 4096 * 4, "less than a single square of scores"


def test_segments_of_one_side_alone_are_refused():
    q, k = np.zeros((1, 4, 2, 8), np.float32), np.zeros((1, 4, 1, 8), np.float32)
    with pytest.raises(ValueError, match="or neither"):
        attention(q, k, k, query_segments_bs=np.ones((1, 4), np.int32))
