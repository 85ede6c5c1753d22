"""The present state of a supervisor (`state.json`), and its end (`verdict.json`)."""

import contextlib
import json
import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zaya_jax.aegis.exit_codes import MEANINGS, SupervisorExit
from zaya_jax.aegis.processes import Rank
from zaya_jax.errors import printable
from zaya_jax.run.files import write_atomically
from zaya_jax.run.progress_record import Phase
from zaya_jax.run.supervision import STATE, VERDICT
from zaya_jax.run.writing import new_file


def describe_ranks(ranks: Sequence[Rank]) -> list[dict[str, Any]]:
    """Describe the processes, for JSON: index, pid, exit status, phase, steps, loss, seconds in each phase."""
    return [_describe(rank) for rank in ranks]


def _describe(rank: Rank) -> dict[str, Any]:
    progress, status = rank.progress, None if rank.end is None else rank.end.status
    row: dict[str, Any] = {"rank": rank.index, "pid": rank.process.pid, "exit_status": status}
    if progress is None:
        return row | {"phase": "start", "step": None, "loss": None}
    loss = progress.loss if math.isfinite(progress.loss) else None
    first, step = (progress.first_step, progress.step) if progress.first_step >= 0 else (None, None)
    times = {phase.name.lower(): round(seconds, 3) for phase, seconds in zip(Phase, progress.seconds, strict=True)}
    return row | {"phase": progress.phase.name.lower(), "step": step, "loss": loss, "first_step": first, "times": times}


def write_state(folder: Path, **state: Any) -> None:
    """Replace `state.json`, without waiting for the disk; a full disk is ignored."""
    with contextlib.suppress(OSError), new_file(folder / STATE, sync=False) as file:
        file.write((json.dumps({"unix": time.time(), "pid": os.getpid(), **state}) + "\n").encode())


def write_verdict(folder: Path, code: SupervisorExit, why: str, attempts: int, step: int) -> None:
    """Write how the supervisor ended, since some schedulers hide exit codes; on a full disk, try for some seconds."""
    verdict = {"exit_code": int(code), "name": code.name.lower(), "meaning": MEANINGS[code],
               "why": printable(why, 2000), "attempts": attempts, "step": step if step >= 0 else None,
               "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}  # fmt: skip
    for pause in (0.0, 1.0, 2.0):
        time.sleep(pause)
        with contextlib.suppress(OSError):
            return write_atomically(folder / VERDICT, json.dumps(verdict, indent=1) + "\n")
