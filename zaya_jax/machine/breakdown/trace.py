"""Read a profiler trace of one program, and attribute the time of a device to the parts of a step."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zaya_jax.errors import InputError
from zaya_jax.machine.compilers.collectives import KINDS
from zaya_jax.machine.compilers.hlo import Place, entry_place, parse, walk
from zaya_jax.machine.compilers.predict import instruction_part
from zaya_jax.ops.parts import OTHER
from zaya_jax.train.profiler import PROGRAM, WINDOW

# In command buffers, a trace does not show the instructions.
WITHOUT_COMMAND_BUFFERS = "--xla_gpu_enable_command_buffer="
_CONTAINERS = ("while", "call", "conditional")  # whose time is that of the operations inside
_COLLECTIVES = (*KINDS, "collective-broadcast")


class Interval(NamedTuple):
    """One operation on one thread or stream."""

    start: float  # in ns
    end: float  # in ns
    part: str  # of the step, see `ops.parts`
    is_collective: bool = False  # whether it communicates
    name: str = ""  # of the instruction


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
    """Read what `train.profiler` wrote into `folder`.

    Args:
      folder: of the trace.
      module: part of the program's name; operations of others do not count.

    Raises:
      InputError: the folder has no finished trace, or one without operations of the step.
    """
    try:
        window: dict[str, Any] = json.loads((folder / WINDOW).read_text(encoding="utf-8"))
        entry = entry_place(parse((folder / PROGRAM).read_text(encoding="utf-8")))
        file = max(folder.glob("plugins/profile/*/*.xplane.pb"))
    except (OSError, ValueError) as error:
        raise InputError(f"{folder} contains no finished trace. Set profile.start to a step that the run has not "
                         "reached, and let it train to the end of the window.") from error  # fmt: skip
    kinds = {instruction.name: (instruction_part(place, instruction), instruction.opcode)
             for place in walk(entry) for instruction in place.instructions}  # fmt: skip
    operations = [(*event, *kinds.get(event[2], (OTHER, ""))) for event in _events(file, module)]
    intervals = [Interval(start, end, part, opcode.startswith(_COLLECTIVES), name)
                 for start, end, name, part, opcode in operations if opcode not in _CONTAINERS]  # fmt: skip
    if not intervals:
        raise InputError(f"{file} has no operations of the traced program ({module}). On NVIDIA GPUs, command buffers "
                         f"hide them: set XLA_FLAGS={WITHOUT_COMMAND_BUFFERS} and trace again.")  # fmt: skip
    return Trace(intervals, entry, *(window[name] for name in ("first_step", "steps", "seconds", "device", "devices")))


def _events(file: Path, module: str) -> Iterator[tuple[float, float, str]]:
    """Yield (start, end, name of the instruction) of the first device; times in ns."""
    by_device: dict[Any, list[tuple[float, float, str]]] = {}
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        for line in plane.lines:
            for event in line.events:
                stats = dict(event.stats)
                if "hlo_op" in stats and module in str(stats.get("hlo_module", module)):
                    device = (plane.name, stats.get("device_ordinal", 0))
                    by_device.setdefault(device, []).append((event.start_ns, event.end_ns, str(stats["hlo_op"])))
    yield from by_device[min(by_device)] if by_device else ()


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
