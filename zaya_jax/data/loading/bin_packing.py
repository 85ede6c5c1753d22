"""Pack whole documents into bins of a fixed number of tokens by best-fit decreasing.

Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv:2404.10830), as in ZAYA1's fine-tuning
(docs/reference.md §6.2). Items are placed from the largest to the smallest, each into the fullest bin that fits it.
"""

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
    ties between equally full bins go to the one that reached that level last. A million items take about a second.
    """
    order = np.argsort(-sizes.astype(np.int64), kind="stable")
    bin_numbers = np.empty(len(order), np.int64)
    opened = 0
    by_room: dict[int, list[int]] = {}  # free room → stack of the bins that have it
    rooms: list[int] = []  # its keys, ascending
    for item, size in enumerate(sizes[order].tolist()):
        place = bisect_left(rooms, size)
        if place == len(rooms):  # no bin has room
            room, chosen = capacity, opened
            opened += 1
        else:
            room = rooms[place]
            chosen = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        bin_numbers[item] = chosen
        if left := room - size:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(chosen)
    by_bin = np.argsort(bin_numbers, kind="stable")
    starts = np.concatenate([[0], np.cumsum(np.bincount(bin_numbers))])
    return Bins(members=order[by_bin], starts=starts.astype(np.int64))
