"""Train like `zaya_jax.main`, note times and memory, and kill this process in the middle of the run.

`python -m benchmarks.gpu_report.observed_training NOTES CHECKPOINT -- ARGUMENTS` writes what it has seen to NOTES. It
dies after step 2, once the checkpoint of step 1 is saved.
"""

import json
import os
import runpy
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.benchmark_command import peak_memory
from zaya_jax.run.files import write_atomically
from zaya_jax.run.progress_record import Phase, ProgressRecord

SAVED, LAST = 1, 2  # the step whose checkpoint is timed, and the last one
_PATIENCE = 600.0  # seconds that saving may take after the last step


def observe(output: Path, checkpoint: Path) -> None:
    """Note what the progress record of this process says in the JSON file `output`; times are of `time.monotonic`.

    The folder of the checkpoint of step `SAVED` appears when it is durable.
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
            notes["device_peak"], notes["host_peak"] = device_peak(), peak_memory()
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


if __name__ == "__main__":
    _, output, checkpoint, _, *trainer = sys.argv
    observe(Path(output), Path(checkpoint))
    sys.argv = ["zaya_jax.main", *trainer]
    runpy.run_module("zaya_jax.main", run_name="__main__", alter_sys=True)
