"""Reduce long series, so that a run of any length makes a page of the same size."""

import math
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")

POINTS = 1000  # of a line in the page; a wide screen has about as many pixels


def thin(xs: Sequence[float], ys: Sequence[float], most: int = POINTS) -> tuple[list[float], list[float]]:
    """Return at most `most` of the points of a line, with its ends, peaks and dips.

    Args:
      xs: positions, in order.
      ys: values; NaN is a gap, and stays one if the line has no value near it.
      most: at least 4.
    """
    if len(xs) <= most:
        return list(xs), list(ys)
    last, kept = len(xs) - 1, {0, len(xs) - 1}
    buckets = (most - 2) // 2
    for bucket in range(buckets):
        part = range(1 + bucket * (last - 1) // buckets, 1 + (bucket + 1) * (last - 1) // buckets)
        known = [index for index in part if not math.isnan(ys[index])]
        kept |= {min(known, key=ys.__getitem__), max(known, key=ys.__getitem__)} if known else {part[0]}
    return [xs[index] for index in sorted(kept)], [ys[index] for index in sorted(kept)]


class Thinned(Generic[T]):
    """Keeps items that are added, evenly spread: each of a few, every second, fourth, … of many.

    Attributes:
      steps: of the kept items.
      items: the kept items.
    """

    def __init__(self, most: int) -> None:
        """Keep at most `most` items, and the last one; at least half as many once there are so many."""
        self.steps: list[int] = []
        self.items: list[T] = []
        self._most, self._stride, self._count = most, 1, 0
        self._last: tuple[int, T] | None = None

    def add(self, step: int, item: T) -> None:
        """Add the item of `step`."""
        self._last = step, item
        if self._count % self._stride == 0:
            if len(self.steps) == self._most:
                del self.steps[1::2], self.items[1::2]
                self._stride *= 2
            if self._count % self._stride == 0:
                self.steps.append(step)
                self.items.append(item)
        self._count += 1

    def close(self) -> None:
        """Keep the last item, too; none follows."""
        if self._last is not None and self.steps[-1] != self._last[0]:
            self.steps.append(self._last[0])
            self.items.append(self._last[1])


def significant(value: float | None) -> float | None:
    """Round to 5 significant digits, which no plot can show more of; None if the value is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return rounded if math.isfinite(rounded) else value  # of the largest floats
