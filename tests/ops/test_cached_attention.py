"""Attention to a cache, whole or a ring, against attention to the whole sequence."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import assert_close
from zaya_jax.ops.attention import AttentionInputs, attention
from zaya_jax.ops.cached_attention import cached_attention

B, T, H, K, C = 2, 24, 4, 2, 8
whole = jax.jit(attention, static_argnames="window")
step = jax.jit(cached_attention, static_argnames="attention")


def drawn(seed):
    rng = np.random.default_rng(seed)
    q, k, v = (rng.normal(size=(B, T, heads, C)).astype(np.float32) for heads in (H, K, K))
    segments = (1 + (np.arange(T) >= rng.integers(0, T, (B, 1)))).astype(np.int32)  # two documents
    return q, k, v, segments


def empty(slots):
    return tuple(np.zeros((B, slots, K * C), np.float32) for _ in range(2))


def extend(arrays, seen, cache, lengths, counts, size, window):
    """Each row's next `counts` tokens in a call of `size` tokens; the outputs, and the cache after it."""
    pieces = [np.zeros((B, size, *x.shape[2:]), x.dtype) for x in arrays]
    for row, (start, count) in enumerate(zip(lengths, counts, strict=True)):
        for piece, x in zip(pieces, arrays, strict=True):
            piece[row, :count] = x[row, start : start + count]
        seen[row, start : start + count] = arrays[-1][row, start : start + count]
    out, cache = step(attention, AttentionInputs(*pieces, seen, np.array(lengths, np.int32), window), cache)
    assert not np.any(np.asarray(out)[pieces[-1] == 0])
    return np.asarray(out), cache


# Sizes below, at and above those of the rings; each is compiled.
@pytest.mark.parametrize("window", [4, None])
@settings(max_examples=6)
@given(seed=st.integers(0, 1000), sizes=st.permutations([1, 1, 4, 4, 7, 7]))
def test_rows_of_any_lengths_give_what_whole_sequences_give(window, seed, sizes):
    *qkv, segments = arrays = drawn(seed)
    expected = whole(*qkv, query_segments_bs=segments, key_segments_bt=segments, window=window)
    rng, cache = np.random.default_rng(seed), empty(T if window is None else window)
    lengths, seen, outs = np.zeros(B, int), np.zeros((B, T), np.int32), np.zeros((B, T, H, C), np.float32)
    for size in [*sizes, *[4] * 2 * T]:
        counts = [min(rng.integers(0, size + 1), T - length) for length in lengths]
        out, cache = extend(arrays, seen, cache, lengths, counts, size, window)
        for row, count in enumerate(counts):
            outs[row, lengths[row] : lengths[row] + count] = out[row, :count]
        lengths += counts
    assert (lengths == T).all()
    assert_close(outs, expected, 1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_a_cache_holds_the_last_tokens_at_their_slots(window):
    arrays = drawn(0)
    slots, lengths, seen = T if window is None else window, np.zeros(B, int), np.zeros((B, T), np.int32)
    arrays[-1][:] = 1
    cache = empty(slots)
    for counts, size in (((7, 5), 7), ((0, 3), 4), ((1, 1), 1), ((1, 0), 1), ((3, 4), 4)):
        _, cache = extend(arrays, seen, cache, lengths, counts, size, window)
        lengths += counts
    assert lengths.tolist() == [12, 13]
    for row, length in enumerate(lengths):
        for token in range(length - slots if window else 0, length):
            for kept, x in zip(jax.device_get(cache), arrays[1:3], strict=True):
                np.testing.assert_array_equal(kept[row, token % slots], x[row, token].reshape(-1))
        assert not np.any(jax.device_get(cache)[0][row, length:])
