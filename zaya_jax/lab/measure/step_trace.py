"""Read a profiler trace of one program, and attribute the time of a device to the parts of a step."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zaya_jax.errors import InputError
from zaya_jax.lab.predict.compilers.collectives import KINDS
from zaya_jax.lab.predict.compilers.hlo import Place, parse, walk
from zaya_jax.lab.predict.compilers.predict import instruction_part
from zaya_jax.ops.parts import OTHER
from zaya_jax.train.profiler import PROGRAM, WINDOW

_CONTAINERS = ("while", "call", "conditional")  # whose time is that of the operations inside
_COLLECTIVES = (*KINDS, "collective-broadcast")


class Interval(NamedTuple):
    """One operation on one thread or stream."""

    start: float  # in ns
    end: float  # in ns
    part: str  # of the step, see `ops.parts`
    opcode: str = ""  # of the instruction, as HLO text; empty if the program has no such instruction
    name: str = ""  # of the instruction

    @property
    def is_collective(self) -> bool:
        """True if it communicates."""
        return self.opcode.startswith(_COLLECTIVES)


class Timeline(NamedTuple):
    """Seconds of a device."""

    parts: dict[str, float]  # of operations by part, but collectives; shared evenly if several run at a time
    exposed: float  # time in which collectives run and nothing else
    overlapped: float  # time in which collectives run behind other operations

    @property
    def overlap(self) -> float | None:
        """Share of the time of collectives that other operations hide; None without collectives."""
        total = self.exposed + self.overlapped
        return self.overlapped / total if total else None


class Trace(NamedTuple):
    """A trace of steps of one program."""

    intervals: list[Interval]  # the operations of the first device
    entry: Place  # the compiled step
    first_step: int  # the first step; the first of a run is 1
    steps: int  # number of steps
    seconds: float  # their time together, by the host's clock
    device: str  # kind of device, as the runtime calls it
    devices: int  # number of devices that trained


def read_trace(folder: Path, module: str = "train_step") -> Trace:
    """Read operations of programs named like `module`, as `train.profiler` wrote them; InputError without any."""
    try:
        window: dict[str, Any] = json.loads((folder / WINDOW).read_text(encoding="utf-8"))
        entry = parse((folder / PROGRAM).read_text(encoding="utf-8"))
        file = max(folder.glob("plugins/profile/*/*.xplane.pb"))
    except (OSError, ValueError) as error:
        advice = "Set profile.start to a step that the run has not reached, and let it train to the end of the window"
        raise InputError(f"{folder} contains no finished trace. {advice}.") from error
    # Computations that are called, such as branches, and then loops, whose instructions take their part.
    places = (*(Place(entry.computations, name) for name in entry.computations), *walk(entry))
    kinds = {x.name: (instruction_part(place, x), x.opcode) for place in places for x in place.instructions}
    events = _events(file, module)
    operations = (Interval(start, end, *kinds.get(name, (OTHER, "")), name) for start, end, name in events)
    intervals = [interval for interval in operations if interval.opcode not in _CONTAINERS]
    if not intervals:
        raise InputError(f"{file} has no operations of the traced program ({module}).")
    return Trace(intervals, entry, *(window[name] for name in ("first_step", "steps", "seconds", "device", "devices")))


def _events(file: Path, module: str) -> Iterator[tuple[float, float, str]]:
    """Yield (start, end, name of the instruction) of the first device; times in ns."""
    by_device: dict[Any, list[tuple[float, float, str]]] = {}
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for event in (event for line in plane.lines for event in line.events):
            stats = dict(event.stats)
            if "hlo_op" in stats and module in str(stats.get("hlo_module", module)):
                device = (plane.name, stats.get("device_ordinal", 0))
                by_device.setdefault(device, []).append((event.start_ns, event.end_ns, str(stats["hlo_op"])))
    yield from by_device[min(by_device)] if by_device else ()


def instruction_rows(trace: Trace, count: int) -> list[dict[str, Any]]:
    """Return the `count` instructions that take longest, for JSON: ms and calls per step, part, opcode and name."""
    durations = defaultdict[tuple[str, str, str], list[float]](list)
    for interval in trace.intervals:
        durations[interval.part, interval.opcode, interval.name].append((interval.end - interval.start) / 1e6)
    rows = []
    for (part, opcode, name), each in sorted(durations.items(), key=lambda item: -sum(item[1]))[:count]:
        times = {"ms": round(sum(each) / trace.steps, 3), "calls": round(len(each) / trace.steps, 1)}
        rows.append(times | {"part": part, "opcode": opcode, "instruction": name})
    return rows


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
