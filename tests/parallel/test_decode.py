"""Attention to a cache whose slots are split over devices, against attention to the whole sequence."""

import functools

import jax
import numpy as np
from jax.sharding import PartitionSpec

from tests.helpers import assert_close
from tests.train_helpers import fast_jit, on_devices
from zaya_jax.config import ParallelConfig
from zaya_jax.ops.attention import AttentionInputs, attention, partial_attention
from zaya_jax.ops.cached_attention import cached_attention
from zaya_jax.parallel.decode import tree_cached_attention
from zaya_jax.parallel.mesh import make_mesh

B, T, H, K, C = 2, 23, 4, 2, 8
DEVICES, SLOTS = 3, 8  # on each, one slot more than there are tokens
SIZES = [(10, 1, 1, 10, 1, 1, 1), (10, 10, 1, 1, 1, 1, 1)]  # more than a device has slots, on two devices and on three


def drawn():
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(B, T, heads, C)).astype(np.float32) for heads in (H, K, K))
    segments = (1 + (np.arange(T) >= np.array([[3], [11]]))).astype(np.int32)
    return q, k, v, segments


def step_by_step(sizes):
    """The outputs for all tokens, in steps of these sizes, and the keys and values at the end."""
    mesh, (q, k, v, segments) = make_mesh(ParallelConfig(context=DEVICES), jax.devices()[:DEVICES]), drawn()
    none, split = PartitionSpec(), PartitionSpec(None, "context")

    @fast_jit
    @functools.partial(jax.shard_map, mesh=mesh, check_vma=False, out_specs=(none, split),
                       in_specs=(none, none, none, split, none, none, none))  # fmt: skip
    def step(q, k, v, cache, segments, seen, length_b):
        ours = tree_cached_attention(partial_attention, cached_attention)
        return ours(attention, AttentionInputs(q, k, v, segments, seen, length_b), cache)

    seen = np.zeros((B, T), np.int32)
    cache = tuple(np.zeros((B, DEVICES * SLOTS, K * C), np.float32) for _ in range(2))
    outs, lengths = np.zeros(q.shape, np.float32), np.zeros(B, np.int32)
    for size in sizes:
        # The second row gets a token less of several, and the rest at the end.
        counts = np.minimum([size, size - (size > 1)], T - lengths)
        pieces = [np.zeros((B, size, *x.shape[2:]), x.dtype) for x in (q, k, v, segments)]
        for row, (start, count) in enumerate(zip(lengths, counts, strict=True)):
            for piece, x in zip(pieces, (q, k, v, segments), strict=True):
                piece[row, :count] = x[row, start : start + count]
            seen[row, start : start + count] = segments[row, start : start + count]
        out, cache = step(*pieces[:3], cache, pieces[3], seen, lengths)
        for row, (start, count) in enumerate(zip(lengths, counts, strict=True)):
            outs[row, start : start + count] = out[row, :count]
        lengths = lengths + counts
    assert lengths.tolist() == [T] * B
    return outs, jax.device_get(cache)


def both():
    return [step_by_step(sizes) for sizes in SIZES]


def test_new_tokens_join_the_slots_of_their_owners_and_see_those_of_all():
    q, k, v, segments = drawn()
    expected = fast_jit(attention)(q, k, v, query_segments_bs=segments, key_segments_bt=segments)
    for out, cache in on_devices(8, "tests.parallel.test_decode:both"):
        assert_close(out, expected, 1e-5)
        for ours, theirs in zip(cache, (k, v), strict=True):
            np.testing.assert_array_equal(ours[:, :T], theirs.reshape(B, T, -1))
            assert not ours[:, T:].any()
