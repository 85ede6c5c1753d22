"""Attribute the time of a device to the parts of a step, from the intervals in which its operations ran."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple


class Interval(NamedTuple):
    """One operation on one thread or stream.

    Attributes:
      start: in ns.
      end: in ns.
      part: of the step, see `ops.parts`.
      is_collective: whether it communicates.
    """

    start: float
    end: float
    part: str
    is_collective: bool = False


class Timeline(NamedTuple):
    """Seconds of a device. All but `overlapped` add up to `span`.

    Attributes:
      parts: time in which operations of each part run, collectives aside; shared evenly if several run at a time.
      exposed: time in which collectives run and nothing else.
      overlapped: time in which collectives run behind other operations.
      idle: time in which nothing runs.
      span: from the start of the first operation to the end of the last.
    """

    parts: dict[str, float]
    exposed: float
    overlapped: float
    idle: float
    span: float

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
    communicating, exposed, overlapped, idle = 0, 0.0, 0.0, 0.0
    times = sorted(changes)
    for now, after in pairwise(times):
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
        idle += seconds if not communicating and not at_once else 0.0
    span = (times[-1] - times[0]) / 1e9 if times else 0.0
    return Timeline(dict(sorted(parts.items(), key=lambda item: -item[1])), exposed, overlapped, idle, span)
