"""`status.json` of a run: the state of the last process that trained it, for monitoring tools."""

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from zaya_jax.errors import ExitCode, InputError, Superseded, exit_message
from zaya_jax.run.files import read_json, write_atomically
from zaya_jax.run.folder import STATUS, is_locked

RUNNING, FINISHED, STOPPED = "running", "finished", "stopped"  # as written
KILLED = "killed"  # as read: a process of this machine that is gone without having written its end


class Status(NamedTuple):
    """The state of a training process."""

    state: str  # 'running', 'finished', 'stopped' or 'killed'
    time: str  # of the last change of state; UTC, ISO 8601
    host: str
    pid: int
    exit_status: int | None = None  # see `ExitCode`; None while running and if killed
    message: str = ""  # why it stopped, or finished early


@contextlib.contextmanager
def track_status(folder: Path, check: Callable[[], object] = lambda: None) -> Iterator[list[str]]:
    """Write `status.json` at the start and the end of the block; the caller must hold the run's lock.

    The block can add sentences on its end to the list that it gets.
    If other processes have resumed the run, whose status the file then has, `check` raises `Superseded`.
    """
    _write(folder, RUNNING)
    notes: list[str] = []
    try:
        yield notes
    except BaseException as error:
        message, exit_status = exit_message(error)
        with contextlib.suppress(Superseded):
            check()
            _write(folder, STOPPED, exit_status, message)
        raise
    check()
    _write(folder, FINISHED, ExitCode.OK, " ".join(notes))


def mark_stopped(folder: Path, exit_status: int, message: str) -> None:
    """Record in `status.json` that this process has stopped, if it is running there: for exits past `track_status`."""
    status = read_status(folder)
    if status is not None and (status.state, status.host, status.pid) == (RUNNING, os.uname().nodename, os.getpid()):
        _write(folder, STOPPED, exit_status, message)


def read_status(folder: Path) -> Status | None:
    """Return the status of a run; None if it is missing, as in runs of earlier versions, or unreadable."""
    try:
        status = Status(**read_json(folder / STATUS))
    except (InputError, TypeError):
        return None
    if status.state == RUNNING and status.host == os.uname().nodename:
        held = is_locked(folder)  # None: the lock is another user's
        exists = isinstance(status.pid, int) and status.pid < 2**31 and psutil.pid_exists(status.pid)
        if not (exists if held is None else held):
            return status._replace(state=KILLED)
    return status


def _write(folder: Path, state: str, exit_status: int | None = None, message: str = "") -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    status = Status(state, now, os.uname().nodename, os.getpid(), exit_status, message)
    with contextlib.suppress(OSError):  # failures that matter to training report a full disk
        write_atomically(folder / STATUS, json.dumps(status._asdict(), indent=1) + "\n")
