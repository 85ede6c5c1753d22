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
    starts = rng.integers(0, T // 2, B)  # padding on the left, then two documents
    segments = (np.arange(T) >= starts[:, None]).astype(np.int32) * (1 + (np.arange(T) >= T - 5))
    return q, k, v, segments


# Lengths below, at and above those of the rings; each is compiled.
@pytest.mark.parametrize("window", [4, None])
@settings(max_examples=6)
@given(seed=st.integers(0, 1000), sizes=st.permutations([1, 1, 4, 4, 7, 7]))
def test_a_ring_gives_what_the_whole_sequence_gives(window, seed, sizes):
    q, k, v, segments = drawn(seed)
    expected = whole(q, k, v, query_segments_bs=segments, key_segments_bt=segments, window=window)
    slots = T if window is None else window
    cache = tuple(np.zeros((B, slots, K * C), np.float32) for _ in range(2))
    seen, parts, start = np.zeros((B, T), np.int32), [], 0
    for size in sizes:
        new = slice(start, start + size)
        out, cache = step(
            attention, AttentionInputs(*(x[:, new] for x in (q, k, v, segments)), seen, start, window), cache
        )
        parts.append(out)
        seen[:, new] = segments[:, new]
        start += size
    assert start == T
    assert cache[0].shape[1] == slots
    assert_close(np.concatenate(parts, 1), expected, 1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_a_cache_holds_the_last_tokens_at_their_slots(window):
    q, k, v, segments = drawn(0)
    slots = T if window is None else window
    cache = tuple(np.zeros((B, slots, K * C), np.float32) for _ in range(2))
    seen = np.zeros((B, T), np.int32)
    for start, size in ((0, 7), (7, 4), (11, 1)):
        new = slice(start, start + size)
        _, cache = step(
            attention, AttentionInputs(*(x[:, new] for x in (q, k, v, segments)), seen, start, window), cache
        )
        seen[:, new] = segments[:, new]
    cache = jax.device_get(cache)
    for token in range(12 - slots if window else 0, 12):
        np.testing.assert_array_equal(cache[0][:, token % slots], k[:, token].reshape(B, -1))
        np.testing.assert_array_equal(cache[1][:, token % slots], v[:, token].reshape(B, -1))
