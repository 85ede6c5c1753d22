import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zaya_jax.data.bins import pack
from zaya_jax.errors import InputError

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


@settings(max_examples=300, deadline=None)
@given(capacities_and_sizes)
def test_the_bins_are_those_of_best_fit_item_by_item(capacity_and_sizes):
    capacity, sizes = capacity_and_sizes
    assert contents(pack(np.array(sizes, np.int64), capacity)) == best_fit_item_by_item(sizes, capacity)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([7, 100, 1000]), st.sampled_from([np.uint16, np.int32, np.uint64]))
def test_so_they_are_for_many_items(seed, capacity, dtype):
    rng = np.random.default_rng(seed)
    sizes = np.clip(rng.lognormal(np.log(capacity / 6), 1.2, 300), 1, capacity).astype(dtype)
    assert contents(pack(sizes, capacity)) == best_fit_item_by_item(sizes.tolist(), capacity)


@settings(max_examples=300, deadline=None)
@given(capacities_and_sizes)
def test_every_item_is_in_one_bin_and_no_bin_holds_too_much(capacity_and_sizes):
    capacity, sizes = capacity_and_sizes
    sizes = np.array(sizes, np.int64)
    bins = pack(sizes, capacity)
    assert bins.members.dtype == bins.starts.dtype == np.int64
    assert sorted(bins.members) == list(range(len(sizes)))
    assert (bins.starts[0], bins.starts[-1]) == (0, len(sizes))
    assert all(0 < sizes[bins[i]].sum() <= capacity for i in range(len(bins)))


@pytest.mark.parametrize(("capacity", "median"), [(4096, 700), (32_768, 1000), (131_072, 1500)])
def test_documents_leave_next_to_no_padding(capacity, median):
    lengths = np.random.default_rng(0).lognormal(np.log(median), 1.2, 200_000)
    sizes = np.clip(lengths, 1, capacity).astype(np.int64)
    bins = pack(sizes, capacity)
    filled = np.add.reduceat(sizes[bins.members], bins.starts[:-1])
    assert filled.sum() == sizes.sum()
    assert filled.max() <= capacity
    assert np.bincount(bins.members, minlength=len(sizes)).tolist() == [1] * len(sizes)
    assert 1 - filled.sum() / (len(bins) * capacity) < 0.005


def test_no_items_need_no_bins():
    bins = pack(np.array([], np.int64), 4)
    assert (len(bins), bins.members.tolist(), bins.starts.tolist()) == (0, [], [0])


@pytest.mark.parametrize("index", [-1, 2])
def test_an_index_outside_is_an_error(index):
    with pytest.raises(IndexError, match=f"Bin {index} is not among the 2 bins"):
        pack(np.array([3, 3]), 4)[index]


@pytest.mark.parametrize(
    ("sizes", "capacity", "message"),
    [
        ([1, 0, 9], 4, "Item 1 is of size 0, but only sizes from 1 to the capacity of a bin \\(4\\)"),
        ([1, 4, 5, 6], 4, "Item 2 is of size 5,"),
        ([1, -3], 4, "Item 1 is of size -3,"),
        ([1], 0, "The capacity of a bin is 0; it must be at least 1"),
        ([1.5], 4, "The sizes are float64 of shape \\(1,\\); they must be a vector of integers"),
        ([[1]], 4, "of shape \\(1, 1\\)"),
    ],
)
def test_what_cannot_be_packed_is_named(sizes, capacity, message):
    with pytest.raises(InputError, match=message):
        pack(np.array(sizes), capacity)
