"""Make faults on purpose, for drills: `python -m zaya_jax.aegis.faults FAULT@PROCESS:STEP:PHASE … -- …`.

What follows `--` are the arguments of `zaya_jax.main`, which runs in this process. A fault happens when the progress
record of that process enters PHASE after STEP or more steps. Each start has one fault, the next of the list.
"""

import ctypes
import faulthandler
import importlib
import json
import os
import resource
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.errors import InputError
from zaya_jax.run.files import write_atomically
from zaya_jax.run.progress_record import Phase, ProgressRecord

MARKS = "AEGIS_DRILL_MARKS"  # environment variable: folder in which each fault leaves a file, so that it happens once


def _fail() -> None:
    raise RuntimeError("This failure was made on purpose.")


def _hang_device() -> None:
    jax = importlib.import_module("jax")  # the process is a trainer; this room imports no jax
    compute = jax.jit(lambda x: jax.lax.while_loop(lambda x: x < 2, jax.numpy.sin, x))
    jax.block_until_ready(compute(0.5))


def _exhaust_device() -> None:
    jax = importlib.import_module("jax")
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 2**50)  # a CPU does not tell
    jax.block_until_ready(jax.numpy.ones(limit + 2**30, "uint8"))


def _exhaust_host() -> None:
    """Allocate more host memory than this process may, from now on."""
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    limit = pages * resource.getpagesize() + 2**30  # the rest is left to the threads of this process
    resource.setrlimit(resource.RLIMIT_AS, (limit, resource.getrlimit(resource.RLIMIT_AS)[1]))
    bytearray(2**31)


def _signal(number: int) -> Callable[[], None]:
    def send() -> None:
        os.kill(os.getpid(), number)
        time.sleep(3600)  # until it arrives

    return send


FAULTS: dict[str, Callable[[], None]] = {
    "sigkill": _signal(signal.SIGKILL),
    "sigsegv": _signal(signal.SIGSEGV),
    "sigabrt": _signal(signal.SIGABRT),
    "sigstop": _signal(signal.SIGSTOP),
    "sigterm": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "exit1": lambda: os._exit(1),
    "exit137": lambda: os._exit(137),
    "exception": _fail,
    "wait": lambda: time.sleep(3600),
    "global-lock": lambda: ctypes.PyDLL(None).sleep(3600),  # in C, so it keeps Python's global lock
    "device-hang": _hang_device,
    "device-memory": _exhaust_device,
    "host-memory": _exhaust_host,
}


class Fault(NamedTuple):
    """A fault to make: FAULT@PROCESS:STEP:PHASE."""

    name: str
    process: int
    step: int
    phase: Phase

    def __str__(self) -> str:
        """Return the text that `parse_fault` reads."""
        return f"{self.name}@{self.process}:{self.step}:{self.phase.name.lower()}"


def parse_fault(text: str) -> Fault:
    """Read FAULT@PROCESS:STEP:PHASE; `InputError` if it is not of that form."""
    try:
        name, _, place = text.partition("@")
        process, step, phase = place.split(":")
        fault = Fault(name, int(process), int(step), Phase[phase.upper()])
    except (ValueError, KeyError):
        fault = None
    if fault is None or fault.name not in FAULTS:
        phases = ", ".join(phase.name.lower() for phase in Phase)
        allowed = f"with FAULT one of {', '.join(FAULTS)} and PHASE one of {phases}."
        raise InputError(f"{text!r} must have the form FAULT@PROCESS:STEP:PHASE, {allowed}")
    return fault


def arm(faults: Sequence[Fault], process: int, marks: Path) -> None:
    """Let the next fault happen when the progress record of its process gets there."""
    enter, index = ProgressRecord.enter, len(read_marks(marks))
    if index >= len(faults) or faults[index].process != process:
        return
    fault, mark = faults[index], marks / f"{index}.json"

    def enter_and_fail(self: ProgressRecord, phase: Phase) -> None:
        enter(self, phase)
        if phase is fault.phase and self.step >= fault.step and not mark.exists():
            write_atomically(mark, json.dumps({"fault": str(fault), "monotonic": time.monotonic()}))
            FAULTS[fault.name]()

    ProgressRecord.enter = enter_and_fail


def read_marks(marks: Path) -> list[dict[str, Any]]:
    """Return what has happened, in order: `fault`, its text, and `monotonic`, the time."""
    paths = sorted(marks.glob("*.json"), key=lambda path: int(path.stem))
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def main(arguments: Sequence[str]) -> None:
    """Arm the faults, then run the trainer."""
    index = arguments.index("--")
    faults, trainer = [parse_fault(text) for text in arguments[:index]], list(arguments[index + 1 :])
    process = int(trainer[trainer.index("--process") + 1]) if "--process" in trainer else 0
    arm(faults, process, Path(os.environ[MARKS]))
    faulthandler.register(signal.SIGUSR1)
    sys.argv = ["zaya_jax.main", *trainer]
    runpy.run_module("zaya_jax.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
