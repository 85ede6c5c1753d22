"""Follow a training run: score each finished checkpoint once, as it appears."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint.reader import verify_checkpoint
from zaya_jax.config.checks import counted
from zaya_jax.errors import InputError, printable
from zaya_jax.evaluate.results import FOLDER
from zaya_jax.run.checkpoints import CHECKPOINTS, usable_checkpoints
from zaya_jax.run.folder import CONFIG, STATUS, is_locked
from zaya_jax.run.metrics import append_row, read_rows
from zaya_jax.run.status import RUNNING, read_status


def follow(run: Path, path: Path, name: str, score: Callable[[int], dict[str, Any]], seconds: float) -> None:
    """Score the checkpoints of a run until its training ends; it runs, has ended, or has not started yet.

    Each adds a line to the JSONL file `path`, which may have other evaluations, too; steps that it has under `name` are
    not scored again. `score` scores a step, and compares its checksums. If it raises, the checkpoint is left out if it
    is gone or damaged; InputError if it is intact. The run folder is checked every so many `seconds`.
    """
    if not (run / CONFIG).exists():
        print(printable(f"Waiting for a training to start in {run}."))
    done = {row.get("step") for row in read_rows(path) if row.get("name") == name}
    missing: set[int] = set()
    while True:
        ended = has_ended(run)  # first, so that a checkpoint saved between the two checks is not missed
        steps = [step for step in finished_steps(run) if step not in done | missing]
        for step in steps[:1]:  # then check again, because scoring may take longer than the retention of the next one
            try:
                row = score(step)
            except (InputError, OSError):
                gone = step not in finished_steps(run)
                if not gone and not verify_checkpoint(run / CHECKPOINTS / str(step)):
                    raise
                print(f"Step {step} is not scored: its checkpoint {'was removed first' if gone else 'is damaged'}.")
                missing.add(step)
                continue
            append_row(path, {"name": name, **row, "step": step})
            done.add(step)
        if not steps:
            if ended:
                print(
                    printable(f"The training has ended; {path} has the scores of {counted(len(done), 'checkpoint')}.")
                )
                return
            time.sleep(seconds)


def check_followed(run: Path) -> None:
    """Raise `InputError` unless a folder has a run, or nothing that keeps a training from starting in it."""
    if not run.is_dir():
        raise InputError(f"--follow {run} is not a folder, but must be the folder of a run.")
    if (run / CONFIG).exists() or is_locked(run) is not False:
        return
    if any(not entry.name.startswith(".") and entry.name not in (STATUS, FOLDER) for entry in run.iterdir()):
        advice = "Name the folder of a run, or an empty one in which a training will start."
        raise InputError(f"--follow {run} has files but no run. {advice}")


def has_ended(run: Path) -> bool:
    """Return whether a training has started and ended; its lock shows one that has not written its status yet."""
    status, held = read_status(run), is_locked(run)
    ended = held is False if status is None else not held and status.state != RUNNING
    return (run / CONFIG).exists() and ended


def finished_steps(run: Path) -> list[int]:
    """List the steps of checkpoints that are saved completely."""
    return [checkpoint.step for checkpoint in usable_checkpoints(run / CHECKPOINTS)]
