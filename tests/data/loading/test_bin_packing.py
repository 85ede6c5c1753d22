import chex
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_jax.data.loading.bin_packing import pack

capacities_and_sizes = st.integers(1, 60).flatmap(
    lambda capacity: st.tuples(st.just(capacity), st.lists(st.integers(1, capacity), max_size=80))
)


def best_fit_item_by_item(sizes, capacity):
    """The members of each bin: every item looks at every bin."""
    bins, room, changed = [], [], []
    for time, item in enumerate(sorted(range(len(sizes)), key=lambda i: -sizes[i])):
        fitting = [i for i in range(len(bins)) if room[i] >= sizes[item]]
        if fitting:
            chosen = min(fitting, key=lambda i: (room[i], -changed[i]))
        else:
            chosen = len(bins)
            bins, room, changed = [*bins, []], [*room, capacity], [*changed, time]
        bins[chosen].append(item)
        room[chosen] -= sizes[item]
        changed[chosen] = time
    return bins


def contents(bins):
    return [bins[i].tolist() for i in range(len(bins))]


@settings(max_examples=60, deadline=None)
@given(capacities_and_sizes)
def test_the_bins_are_those_of_best_fit_item_by_item(capacity_and_sizes):
    capacity, sizes = capacity_and_sizes
    bins = pack(np.array(sizes, np.int64), capacity)
    assert contents(bins) == best_fit_item_by_item(sizes, capacity)
    chex.assert_type([bins.members, bins.starts], np.int64)
    assert (bins.starts[0], bins.starts[-1]) == (0, len(sizes))


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([7, 100, 1000]), st.sampled_from([np.uint16, np.int32, np.uint64]))
def test_so_they_are_for_many_items(seed, capacity, dtype):
    rng = np.random.default_rng(seed)
    sizes = np.clip(rng.lognormal(np.log(capacity / 6), 1.2, 300), 1, capacity).astype(dtype)
    assert contents(pack(sizes, capacity)) == best_fit_item_by_item(sizes.tolist(), capacity)


@pytest.mark.parametrize(("capacity", "median"), [(4096, 700), (131_072, 1500)])
def test_documents_leave_next_to_no_padding(capacity, median):
    lengths = np.random.default_rng(0).lognormal(np.log(median), 1.2, 50_000)
    sizes = np.clip(lengths, 1, capacity).astype(np.int64)
    bins = pack(sizes, capacity)
    filled = np.add.reduceat(sizes[bins.members], bins.starts[:-1])
    assert 1 - filled.sum() / (len(bins) * capacity) < 0.005
