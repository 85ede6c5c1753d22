"""Attribute the time of a device to the parts of a step, from the intervals in which its operations ran."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple


class Interval(NamedTuple):
    """One operation on one thread or stream."""

    start: float  # in ns
    end: float  # in ns
    part: str  # of the step, see `ops.parts`
    is_collective: bool = False  # whether it communicates


class Timeline(NamedTuple):
    """Seconds of a device."""

    # time in which operations of each part run, collectives aside; shared evenly if several run at a time
    parts: dict[str, float]
    exposed: float  # time in which collectives run and nothing else
    overlapped: float  # time in which collectives run behind other operations

    @property
    def overlap(self) -> float | None:
        """Share of the time of collectives that other operations hide; None without collectives."""
        total = self.exposed + self.overlapped
        return self.overlapped / total if total else None


def attribute(intervals: Iterable[Interval]) -> Timeline:
    """Attribute each moment to what runs in it; intervals may overlap, in any order."""
    changes = defaultdict[float, list[tuple[Interval, int]]](list)
    for interval in intervals:
        changes[interval.start].append((interval, 1))
        changes[interval.end].append((interval, -1))
    parts, running = defaultdict[str, float](float), Counter[str]()
    communicating, exposed, overlapped = 0, 0.0, 0.0
    for now, after in pairwise(sorted(changes)):
        for interval, change in changes[now]:
            if interval.is_collective:
                communicating += change
            else:
                running[interval.part] += change
        seconds, at_once = (after - now) / 1e9, running.total()
        for part, count in running.items():
            if count:
                parts[part] += seconds * count / at_once
        exposed += seconds if communicating and not at_once else 0.0
        overlapped += seconds if communicating and at_once else 0.0
    return Timeline(dict(sorted(parts.items(), key=lambda item: -item[1])), exposed, overlapped)
