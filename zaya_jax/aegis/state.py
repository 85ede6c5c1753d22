"""The present state of a supervisor (`state.json`), and its end (`verdict.json`)."""

import contextlib
import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.processes import Rank
from zaya_jax.errors import InputError, printable
from zaya_jax.run.files import read_object, write_atomically
from zaya_jax.run.progress_record import Phase
from zaya_jax.run.writing import new_file

STATE = "state.json"
VERDICT = "verdict.json"
_RANK = {"rank": int, "phase": str, "step": int | None, "first_step": int | None, "loss": int | float | None}
_LARGEST = 1e300  # of a number in a state, which may have any
_STALE = 10.0  # seconds after which the supervisor that wrote a state counts as gone


def describe_rank(rank: Rank) -> dict[str, Any]:
    """Describe a process, for JSON: index, pid, exit status, phase, steps, loss, seconds in each phase."""
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
    verdict = {"exit_code": int(code), "name": code.name.lower(), "meaning": code.meaning, "why": printable(why, 2000)}
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    verdict |= {"attempts": attempts, "step": step if step >= 0 else None, "time": now}
    for pause in (0.0, 1.0, 2.0):
        time.sleep(pause)
        with contextlib.suppress(OSError):
            return write_atomically(folder / VERDICT, json.dumps(verdict, indent=1) + "\n")


def read_state(folder: Path) -> dict[str, Any]:
    """Return what the supervisor of a node does now; {} if there is nothing, or not what a supervisor writes."""
    state = read_fields(folder / STATE, {"unix": int | float, "ranks": list})
    is_whole = abs(state.get("unix", 0)) < _LARGEST and all(_is_rank(rank, state) for rank in state.get("ranks", ()))
    return state if is_whole else {}


def _is_rank(rank: Any, state: Mapping[str, Any]) -> bool:
    if not isinstance(rank, dict):
        return False
    times, first_step = rank.get("times", {}), rank.get("first_step")
    numbers = (rank.get("loss") or 0, *times.values()) if isinstance(times, dict) else (None,)
    return (
        all(isinstance(rank.get(key), kind) for key, kind in _RANK.items())
        and all(isinstance(each, int | float) and abs(each) < _LARGEST for each in numbers)
        and (first_step is None or rank.get("step") is not None)
        and ("times" not in rank or isinstance(state.get("attempt"), int))
    )


def is_fresh(state: Mapping[str, Any]) -> bool:
    """Return whether `state` was written just now."""
    return time.time() - float(state.get("unix", 0)) < _STALE


def is_running(state: Mapping[str, Any]) -> bool:
    """Return whether the supervisor that wrote `state` still runs."""
    return state.get("state") == "running" and is_fresh(state)


def running_attempt(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `measure_goodput` for the attempt that runs by `state`; none if no attempt runs."""
    if not is_running(state):
        return {}
    process, running = next(iter(state.get("ranks", ())), {}), None
    if "times" in process:
        steps = {"first_step": process.get("first_step"), "last_step": process.get("step")}
        running = {"attempt": state["attempt"], "times": process["times"], **steps}
    return {"now": float(state["unix"]), "running": running}


def read_fields(path: Path, types: Mapping[str, Any]) -> dict[str, Any]:
    """Read a JSON object; empty if it is missing, or its fields have other types than these."""
    try:
        tree = read_object(path)
    except InputError:  # missing, or being replaced
        return {}
    return tree if all(isinstance(tree.get(key), kind) for key, kind in types.items()) else {}
