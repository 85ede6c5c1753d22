"""Train like `zaya_jax.main`, note times and memory, and kill this process in the middle of the run.

`python -m benchmarks.gpu_report.observed_training NOTES CHECKPOINT -- …`, where `…` are the arguments of
`zaya_jax.main`. The process dies after step 2, once the checkpoint of step 1 is saved. What it has seen is in NOTES.
"""

import json
import os
import re
import runpy
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zaya_jax.run.files import write_atomically
from zaya_jax.run.progress_record import Phase, ProgressRecord

SAVED, LAST = 1, 2  # the step whose checkpoint is timed, and the last one
_PATIENCE = 600.0  # seconds that saving may take after the last step


def observe(output: Path, checkpoint: Path) -> None:
    """Note what the progress record of this process says; all times are of `time.monotonic`.

    Args:
      output: JSON file for the notes.
      checkpoint: folder of the checkpoint of step `SAVED`, which appears when it is durable.
    """
    notes: dict[str, Any] = {}
    enter, complete_step = ProgressRecord.enter, ProgressRecord.complete_step

    def note_once(name: str) -> None:
        notes.setdefault(name, time.monotonic())

    def note_commit() -> None:
        while not checkpoint.exists():
            time.sleep(0.005)
        note_once("committed")

    def observed_enter(self: ProgressRecord, phase: Phase) -> None:
        left = self.phase
        enter(self, phase)
        if phase is Phase.RESTORE:
            note_once("restore_started")
        if left is Phase.RESTORE and phase is not Phase.RESTORE:
            note_once("restored")
            notes.setdefault("restored_device_peak", device_peak())
        if left is Phase.SAVE and self.step == SAVED:
            note_once("training_continued")

    def observed_step(self: ProgressRecord, step: int, loss: float, grad_norm: float) -> None:
        complete_step(self, step, loss, grad_norm)
        note_once(f"step_{step}")
        if step == SAVED:
            threading.Thread(target=note_commit, name="commit", daemon=True).start()
        if step == LAST:
            notes["loss"], notes["grad_norm"] = loss, grad_norm
            notes["device_peak"], notes["host_peak"] = device_peak(), host_peak()
            deadline = time.monotonic() + _PATIENCE
            while "step_1" in notes and "committed" not in notes and time.monotonic() < deadline:
                time.sleep(0.005)
            write_atomically(output, json.dumps(notes))
            os.kill(os.getpid(), signal.SIGKILL)

    ProgressRecord.enter, ProgressRecord.complete_step = observed_enter, observed_step


def device_peak() -> int | None:
    """Return the peak bytes in use on the first device; None if it does not count them."""
    import jax  # not earlier, since `zaya_jax.main` sets its flags before

    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def host_peak() -> int:
    """Return the peak resident memory of this process, in bytes."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[0])


def main(arguments: Sequence[str]) -> None:
    """Train, and note what is seen."""
    output, checkpoint, _, *trainer = arguments
    observe(Path(output), Path(checkpoint))
    sys.argv = ["zaya_jax.main", *trainer]
    runpy.run_module("zaya_jax.main", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
