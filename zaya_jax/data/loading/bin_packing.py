"""Pack whole documents into bins of a fixed number of tokens by best-fit decreasing.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv:2404.10830), as in ZAYA1's fine-tuning
(docs/reference.md §6.2). Items are placed from the largest to the smallest, each into the fullest bin that fits it.
"""

from array import array
from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Bins:
    """A packing of items: `bins[i]` has the indices of the items in bin i."""

    members: np.ndarray  # int64 [items]: indices of the items bin by bin, the largest of each bin first
    starts: np.ndarray  # int64 [bins + 1]: start of each bin in `members`, and the end of the last

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.members[self.starts[index] : self.starts[index + 1]]


def pack(sizes: np.ndarray, capacity: int) -> Bins:
    """Pack items by best-fit decreasing, without splitting any. `sizes`, integer [items], are from 1 to `capacity`.

    Deterministic: items of equal size keep their order, bins are numbered in the order in which they are opened, and
    ties between equally full bins go to the one that reached that level last. Time is O(n log n) for n items,
    independent of the number of bins; memory is about 50 bytes per item.
    """
    order = np.argsort(-sizes.astype(np.int64), kind="stable")
    bin_of = _best_fit(sizes[order], capacity)
    by_bin = np.argsort(bin_of, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(bin_of))])
    return Bins(members=order[by_bin], starts=starts.astype(np.int64))


def _best_fit(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of each item, int64 [items], for sizes in descending order.

    Items of one size are placed together. Let r be the smallest free room that fits this size. After a bin of room r
    takes an item, it has room r - size. If the next item still fits there, this is the tightest fit, because every
    other bin that fits has room r or more. So a bin takes r // size items in a row, then the next bin of room r does.
    Each time, a bin's room at least halves (r mod size < r / 2), and each size creates at most two new rooms. Hence the
    number of rounds is O(sizes · log capacity), whatever the number of items.
    """
    bin_of = np.empty(len(sizes), np.int64)
    rooms = _Rooms(capacity)
    ends = np.flatnonzero(np.diff(sizes, append=0)) + 1  # end of each run of equal sizes
    placed = 0
    for end, size in zip(ends.tolist(), sizes[ends - 1].tolist(), strict=True):
        while placed < end:
            room, bins = rooms.take(size, end - placed)
            each = room // size
            # The last bin may get fewer items than fit.
            short = max(len(bins) * each - (end - placed), 0)
            numbers = np.frombuffer(bins, np.int64).repeat(each)
            bin_of[placed : placed + len(numbers) - short] = numbers[: len(numbers) - short]
            placed += len(numbers) - short
            if short:
                rooms.put(room - (each - short) * size, bins[-1:])
                bins.pop()
            rooms.put(room - each * size, bins)
    return bin_of


class _Rooms:
    """The open bins, grouped by their remaining room."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._opened = 0  # bins so far
        self._bins: dict[int, array[int]] = {}  # room → stack of bin numbers, int64
        self._sorted: list[int] = []  # keys of `_bins`, ascending

    def take(self, size: int, items: int) -> tuple[int, "array[int]"]:
        """Remove the bins to fill next with `items` items of one size; return their room and their numbers in order.

        They may not be enough for all items.
        """
        at = bisect_left(self._sorted, size)
        if at == len(self._sorted):  # no bin has room
            first = self._opened
            self._opened += -(-items // (self._capacity // size))
            return self._capacity, array("q", range(first, self._opened))
        room = self._sorted[at]
        stack = self._bins[room]
        needed = -(-items // (room // size))
        bins = stack[-needed:]
        bins.reverse()
        del stack[-needed:]
        if not stack:
            del self._bins[room], self._sorted[at]
        return room, bins

    def put(self, room: int, bins: "array[int]") -> None:
        """Return bins that now have `room` left."""
        if not bins or room == 0:  # nothing fits into a full bin
            return
        if room in self._bins:
            self._bins[room].extend(bins)
        else:
            self._bins[room] = bins
            insort(self._sorted, room)
