"""Fencing tokens, which stop superseded processes of a run from writing where their successors write.

Processes that start or resume a run take the next token (a number) and record the checkpoints that exist. A checkpoint
is current only if it was saved with the newest token, or existed when a newer token was taken. On disk, in the file
`GENERATION` and in manifests, the token is called `generation`.
"""

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from zaya_jax.errors import InputError, Superseded
from zaya_jax.run.digests import digest
from zaya_jax.run.files import read_file, read_json, write_atomically
from zaya_jax.run.signals import warn_once

FENCE = "GENERATION"  # file in a folder of checkpoints
_LEAP = 1000  # more tokens than any run takes without saving a checkpoint
_EVERY = 10.0  # seconds between two looks at the file while a process computes or waits
_STARTED = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
JOB = "ZAYA_JOB"  # environment variable with the random name of the job of several nodes to which a process belongs
_TAKER = {"host": os.uname().nodename, "pid": os.getpid(), "started": _STARTED, "job": os.environ.get(JOB, "")}


class FencingToken(NamedTuple):
    """The newest token of a checkpoint folder."""

    number: int  # greater than all before
    accepted: Mapping[int, int]  # step → token of the checkpoints that existed when it was taken
    # `host`, `pid`, start (`started`, UTC) and `job` of the process that took it; empty in files of earlier versions.
    taker: Mapping[str, str | int] = MappingProxyType({})

    def accepts(self, step: int, number: int) -> bool:
        """Return whether the checkpoint of `step`, saved with the token `number`, is current."""
        return number == self.number or self.accepted.get(step) == number


class Fence:
    """The token that this process holds. Once another process takes a newer one, this one must not write any more."""

    def __init__(self, folder: Path, leave: Callable[[Superseded], object] = lambda error: None) -> None:
        """Hold no token of the checkpoint folder yet; `leave` ends a superseded process at once, from any thread."""
        self._folder, self._leave = folder, leave
        self._number, self._content = 0, b""  # of the token, and of the file that has it
        self._lock = threading.Lock()  # only one thread leaves

    def take(self, checkpoints: Mapping[int, int]) -> FencingToken:
        """Take the next token, which accepts `checkpoints` (step → token) and supersedes other processes of this run.

        `Superseded` if another process has superseded this one, `OSError` if the token cannot be written.
        """
        self.check()
        previous, newest = read_token(self._folder), max(checkpoints.values(), default=0)
        # Only the file knows tokens that have saved nothing yet. If it is lost, skip past them.
        number = 1 + (max(previous.number, newest) if previous else newest + _LEAP * bool(checkpoints))
        accepted = {str(step): number for step, number in checkpoints.items()}
        tree = {"generation": number, "accepted": accepted, **_TAKER}
        text = json.dumps({**tree, "digest": digest(json.dumps(tree).encode())}) + "\n"
        write_atomically(self._folder / FENCE, text)
        self._number, self._content = number, text.encode()
        return FencingToken(number, dict(checkpoints), _TAKER)

    def check(self) -> str:
        """Raise `Superseded` if another process has taken a newer token; do nothing if this one has none.

        Returns why they cannot be compared, in which case this process is not superseded; empty if they are equal.
        """
        with self._lock:
            with contextlib.suppress(OSError):  # `read_token` explains it
                if not self._number or read_file(self._folder / FENCE) == self._content:
                    return ""
            newest = read_token(self._folder)
            if newest is None or newest.number < self._number:
                return f"The fencing token of {self._folder} cannot be read; restart the run."
            taker = "Process {pid} on {host}, started at {started}, took it. " if newest.taker else ""
            numbers = f"its fencing token is now {newest.number}, this process has {self._number}"
            by = taker.format_map(newest.taker)
            error = Superseded(
                f"Other processes have resumed this run: {numbers}. {by}This process writes nothing more."
            )
            self._leave(error)
            raise error

    def watch(self) -> Callable[[], None]:
        """Also `check` every 10 s in a thread, since steps and saves may take hours; return a function that ends it."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(_EVERY):
                with contextlib.suppress(Superseded):  # which the next `check` of the training loop raises, too
                    self.check()

        threading.Thread(target=look, name="fence", daemon=True).start()
        return ended.set


def read_token(folder: Path) -> FencingToken | None:
    """Return the newest token; None if none was taken (as in a copied folder) or, with a warning, if unreadable."""
    path = folder / FENCE
    try:
        tree = read_json(path)
        if tree.pop("digest") != digest(json.dumps(tree).encode()):
            raise InputError(f"{path} does not match its checksum.")
        accepted = {int(step): number for step, number in tree["accepted"].items()}
        if any(type(number) is not int for number in (tree["generation"], *accepted.values())):
            raise InputError(f"{path} has tokens that are no numbers.")
        return FencingToken(tree["generation"], accepted, {key: tree.get(key, "") for key in _TAKER if "pid" in tree})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if os.path.lexists(path):
            problem = error if isinstance(error, InputError) else f"{path} is damaged."
            effect = "Without it, checkpoints that superseded processes saved count as current."
            warn_once(f"Warning: {problem} {effect}")
        return None


def newest_job(folder: Path) -> str | None:
    """Return the job whose process took the newest token, '' for a process of none; None if no token can be read."""
    token = read_token(folder)
    return None if token is None else str(token.taker.get("job", ""))


def is_current(folder: Path, step: int, number: int) -> bool:
    """Return whether the checkpoint of `step` was not saved by a superseded process."""
    token = read_token(folder)
    return token is None or token.accepts(step, number)
