"""Read a profiler trace of one program: when each operation of a device ran, and its part of the step."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zaya_jax.errors import InputError
from zaya_jax.machine.breakdown.timeline import Interval
from zaya_jax.machine.compilers.collectives import KINDS
from zaya_jax.machine.compilers.hlo import Place, entry_place, parse, walk
from zaya_jax.machine.compilers.predict import instruction_part
from zaya_jax.ops.parts import OTHER
from zaya_jax.train.profiler import PROGRAM, WINDOW

_CONTAINERS = ("while", "call", "conditional")  # whose time is that of the operations inside
_COLLECTIVES = (*KINDS, "collective-broadcast")


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
    intervals = [Interval(start, end, part, opcode.startswith(_COLLECTIVES))
                 for start, end, _, part, opcode in operations if opcode not in _CONTAINERS]  # fmt: skip
    if not intervals:
        raise InputError(f"{file} has no operations of the traced program ({module}). On NVIDIA GPUs, command buffers "
                         "hide them: set XLA_FLAGS=--xla_gpu_enable_command_buffer= and trace again.")  # fmt: skip
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
