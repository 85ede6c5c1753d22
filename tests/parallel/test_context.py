"""Pieces of a sequence on several devices: order, halos, ring and tree."""

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from tests.helpers import assert_close
from tests.train_helpers import fast_jit, on_devices
from zaya_jax.config import ParallelConfig
from zaya_jax.ops.attention import (
    AttentionInputs,
    attention,
    combine,
    partial_attention,
    partial_attention_gradient,
)
from zaya_jax.parallel.context import device_pieces, gathered_attention, sequence_order, tree_attention
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.parallel.ring import Ring, ring_attention

configs = st.builds(ParallelConfig, context=st.sampled_from([1, 2, 3, 4, 8]),
                    context_layout=st.sampled_from(["contiguous", "zigzag"]))  # fmt: skip


@given(config=configs, length=st.integers(1, 5))
def test_devices_hold_each_token_once_and_work_alike(config, length):
    whole = config.chunks * length
    order = sequence_order(config, whole)
    order = np.arange(whole) if order is None else order
    assert sorted(order) == list(range(whole))
    mine = order.reshape(config.context, -1)
    for device, tokens in enumerate(mine):
        pieces = [list(range(piece * length, (piece + 1) * length)) for piece in device_pieces(config, device)]
        assert tokens.tolist() == list(itertools.chain(*pieces))
    if config.context_layout == "zigzag":  # causal work, the keys that each token sees, is the same everywhere
        assert len({int((tokens + 1).sum()) for tokens in mine}) == 1


def problem(seed, b=2, s=24, t=24, h=4, k=2, c=8):
    rng = np.random.default_rng(seed)
    q, key, value = (rng.normal(size=(b, n, heads, c)) for n, heads in ((s, h), (t, k), (t, k)))
    segments = np.sort(rng.integers(0, 4, (b, t)), -1)[:, ::-1].copy()
    return q, key, value, segments[:, t - s :].astype(np.int32), segments.astype(np.int32)


def test_parts_of_the_keys_join_to_all_of_them():
    cut, window = 9, 3

    @fast_jit
    def both(q, k, v, q_seg, k_seg):
        first = partial_attention(AttentionInputs(q, k[:, :cut], v[:, :cut], q_seg, k_seg[:, :cut], 0, window))
        second = partial_attention(AttentionInputs(q, k[:, cut:], v[:, cut:], q_seg, k_seg[:, cut:], -cut, window))
        whole = attention(q, k, v, query_segments_bs=q_seg, key_segments_bt=k_seg, window=window)
        return combine(first, second).o_bshc, whole

    for seed in range(3):
        joined, whole = both(*(np.float32(x) if x.dtype == np.float64 else x for x in problem(seed)))
        assert_close(joined, whole, 1e-5)


def trees(window, seeds):
    """Tree attention on four devices with caches filled differently, and the attention of one to all of them."""
    mesh, pairs = make_mesh(ParallelConfig(context=4), jax.devices()[:4]), []

    def region(q, k, v, q_seg, k_seg, start, length):
        x = AttentionInputs(q, k, v, q_seg, k_seg, length - 3 - start[0], window)
        return tree_attention(partial_attention, x)

    none, split = PartitionSpec(), PartitionSpec(None, "context")
    specs = (none, split, split, none, split, PartitionSpec("context"), none)
    tree = fast_jit(jax.shard_map(region, mesh=mesh, in_specs=specs, out_specs=none, check_vma=False))

    @fast_jit
    def alone(q, k, v, q_seg, k_seg, length):  # what comes after its last query, a query does not see
        return attention(q, k, v, query_segments_bs=q_seg, key_segments_bt=k_seg, query_offset=length - 3,
                         window=window)  # fmt: skip

    for seed in seeds:
        q, k, v, _, k_seg = problem(seed, s=3, t=32)
        filled = np.sort(np.random.default_rng(seed).integers(0, 9, 4))[::-1]  # of each device's eight places
        starts = np.cumsum(filled) - filled
        length = int(filled.sum())
        q_seg = k_seg[:, length - 3 : length]

        def spread(x, starts=starts, filled=filled):
            parts = [np.pad(x[:, a : a + n], ((0, 0), (0, 8 - n), *[(0, 0)] * (x.ndim - 2)))
                     for a, n in zip(starts, filled, strict=True)]  # fmt: skip
            return np.concatenate(parts, 1)

        with jax.enable_x64(True):
            out = tree(q, spread(k), spread(v), q_seg, spread(k_seg), starts, length)
            pairs.append((np.asarray(out), np.asarray(alone(q, k, v, q_seg, k_seg, length)), filled))
    return pairs


@pytest.mark.parametrize("window", [None, 5])
def test_tree_attention_over_caches_of_unequal_fill_is_the_whole_attention(window):
    for tree, whole, filled in on_devices(8, "tests.parallel.test_context:trees", window, [0, 1, 2, 3]):
        assert len(set(filled)) > 1
        assert_close(tree, whole, 1e-6)


def test_a_layout_without_pieces_leaves_the_order():
    assert sequence_order(ParallelConfig(), 8) is None
    assert sequence_order(ParallelConfig(context=2, context_layout="contiguous"), 8) is None
    assert sequence_order(ParallelConfig(context=2), 8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]


@pytest.mark.parametrize("kind", ["gathered", "ring"])
def test_a_cache_is_refused_where_a_sequence_lies_over_devices(kind):
    config = ParallelConfig(context=2)
    attend = gathered_attention(config, attention)
    if kind == "ring":
        attend = ring_attention(Ring(config, partial_attention, partial_attention_gradient))
    q, k, v, q_seg, k_seg = problem(0)
    with pytest.raises(ValueError, match="cache"):
        attend(q, k, v, query_segments_bs=q_seg, key_segments_bt=k_seg, query_offset=1)
