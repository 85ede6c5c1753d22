"""Make faults on purpose, for drills and tests: `python -m zaya_jax.aegis.faults FAULT@PROCESS:STEP:PHASE … -- …`.

What follows `--` are the arguments of `zaya_jax.main`, which runs in this process. A fault happens when the progress
record of that process enters PHASE after STEP or more steps. The trainer itself contains no code for this.
"""

import ctypes
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from zaya_jax.errors import InputError
from zaya_jax.run.progress_record import Phase, ProgressRecord

MARKS = "AEGIS_DRILL_MARKS"  # environment variable: folder in which each fault leaves a file, and so happens once


def _hold_global_lock() -> None:
    """Sleep for an hour in C, without releasing Python's global lock."""
    ctypes.PyDLL(None).sleep(3600)


def _fail() -> None:
    raise RuntimeError("This failure was made on purpose.")


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
    "global-lock": _hold_global_lock,
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
        raise InputError(f"{text!r} must have the form FAULT@PROCESS:STEP:PHASE, with FAULT one of "
                         f"{', '.join(FAULTS)} and PHASE one of {phases}.")  # fmt: skip
    return fault


def arm(faults: Sequence[Fault], process: int, marks: Path | None) -> None:
    """Let the faults of this process happen when its progress record gets there."""
    enter = ProgressRecord.enter

    def enter_and_fail(self: ProgressRecord, phase: Phase) -> None:
        enter(self, phase)
        for fault in faults:
            is_due = (fault.process, fault.phase) == (process, phase) and self.step >= fault.step
            if is_due and _mark(fault, marks):
                FAULTS[fault.name]()

    ProgressRecord.enter = enter_and_fail


def _mark(fault: Fault, marks: Path | None) -> bool:
    """Leave a file with the time of the fault; returns whether the fault is still to happen."""
    if marks is None:
        return True
    try:
        with (marks / str(fault)).open("x", encoding="utf-8") as file:
            file.write(json.dumps({"monotonic": time.monotonic()}))
    except FileExistsError:
        return False
    return True


def main(arguments: Sequence[str]) -> None:
    """Arm the faults, then run the trainer."""
    index = arguments.index("--")
    faults, trainer = [parse_fault(text) for text in arguments[:index]], list(arguments[index + 1 :])
    process = int(trainer[trainer.index("--process") + 1]) if "--process" in trainer else 0
    marks = os.environ.get(MARKS)
    arm(faults, process, Path(marks) if marks else None)
    faulthandler.register(signal.SIGUSR1)
    sys.argv = ["zaya_jax.main", *trainer]
    runpy.run_module("zaya_jax.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
