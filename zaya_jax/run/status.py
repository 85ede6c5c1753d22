"""`status.json` of a run: what became of the last process that trained it, for tools that watch or report."""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from zaya_jax.errors import ExitCode, InputError, last_words
from zaya_jax.run.files import read_json, write_atomically
from zaya_jax.run.folder import STATUS, is_locked

RUNNING, FINISHED, STOPPED = "running", "finished", "stopped"  # as written
KILLED = "killed"  # as read: a process of this machine that is gone and has not written its end


class Status(NamedTuple):
    """What became of a process."""

    state: str  # 'running', 'finished', 'stopped' or 'killed'
    time: str  # since when, in UTC, as ISO 8601
    host: str
    pid: int
    exit_status: int | None = None  # see `ExitCode`; None while it runs, and where it was killed
    message: str = ""  # why it stopped, in full sentences


@contextlib.contextmanager
def track_status(folder: Path) -> Iterator[None]:
    """Write `status.json` when the block begins and when it ends, however it ends; the run's lock must be held."""
    _write(folder, RUNNING)
    try:
        yield
    except BaseException as error:
        message, exit_status = last_words(error)
        _write(folder, STOPPED, exit_status, message)
        raise
    _write(folder, FINISHED, ExitCode.OK)


def read_status(folder: Path) -> Status | None:
    """The status of a run; None where it has none, as runs of earlier versions, or it cannot be read."""
    try:
        status = Status(**read_json(folder / STATUS))
    except (InputError, TypeError):
        return None
    if status.state == RUNNING and status.host == os.uname().nodename and not is_locked(folder):
        return status._replace(state=KILLED)
    return status


def _write(folder: Path, state: str, exit_status: int | None = None, message: str = "") -> None:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    status = Status(state, now, os.uname().nodename, os.getpid(), exit_status, message)
    with contextlib.suppress(OSError):  # a full disk is reported by what training needs
        write_atomically(folder / STATUS, json.dumps(status._asdict(), indent=1) + "\n")
