"""The progress record: what a training process does now, written by its training loop and read by a supervisor.

A supervisor makes a record for each process, a file in memory whose path is in the environment variable
`ZAYA_PROGRESS`. Without one, the record is memory that nobody reads. Only the training loop writes it, never a helper
thread, which would keep writing while the loop hangs.

It is written in one piece with a checksum, so that a reader recognizes a write in progress. A process that takes
over a record keeps a copy of what the one before it left, which a supervisor may not have read yet.
"""

import contextlib
import enum
import math
import mmap
import os
import re
import select
import signal
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from zaya_jax.errors import Reason

VARIABLE = "ZAYA_PROGRESS"  # environment variable with the path of the record
NAME = "zaya-progress"  # of the file in memory


class Phase(enum.IntEnum):
    """The phases of a training process. The names are those of the timeouts in a supervisor's policy."""

    START = 0  # imports, before anything else
    JOIN = 1  # meets the other processes of the job
    OPEN = 2  # opens the run folder and the data
    RESTORE = 3  # initializes or restores the state
    COMPILE = 4
    DATA = 5  # waits for the next batch
    DISPATCH = 6  # starts a step
    DEVICE_WAIT = 7  # waits for the results of a step
    EVALUATE = 8
    SAVE = 9  # waits for a checkpoint
    FINISH = 10  # after the last step
    END = 11  # has left its exit record


class ExitRecord(NamedTuple):
    """The reason for which a process ends."""

    status: int  # the exit status that it chose
    sentence: str  # what it printed last
    is_origin: bool  # whether it ends by itself, not since another process was lost
    time_ns: int  # of `time.monotonic_ns`
    reason: Reason = Reason.OTHER  # what the status does not tell


class Progress(NamedTuple):
    """The content of a record."""

    # Number of writes so far; it grows as long as the process makes progress, and alike in all processes of a job,
    # which enter the same phases.
    writes: int
    pid: int  # process that writes it
    phase: Phase  # what it does now
    step: int  # number of steps done, of the whole run
    first_step: int  # number of steps that were done when this process started to train; -1 before that
    loss: float  # of the last step, in nats/token; NaN before the first
    grad_norm: float  # of the last step; NaN before the first
    seconds: tuple[float, ...]  # time spent in each phase so far, except the current stay in the current phase
    longest: tuple[float, ...]  # seconds of the longest stay in each phase, likewise
    exit_record: ExitRecord | None  # why the process ends; None if it has not recorded that
    run: int = 0  # number that stands for the run folder; 0 before training


_MAGIC = b"ZAYA\x00\x00\x00\x04"
_LONGEST_SENTENCE = 1024  # bytes
# Magic; writes, pid, phase, step, first_step, loss, grad_norm, run; seconds and longest; and of the exit record status,
# is_origin, reason, time_ns, bytes of the sentence, and the sentence.
_RECORD = struct.Struct(f"<8s QIIqqddI {2 * len(Phase)}d iBBqH{_LONGEST_SENTENCE}s")
_CHECKSUM = struct.Struct("<I")
_BYTES = _RECORD.size + _CHECKSUM.size
SIZE = 2 * _BYTES  # bytes of the file: the record, and a copy of what the process before the current one left


class ProgressRecord:
    """The writing side; each write takes about 10 microseconds and cannot block or fail."""

    def __init__(self, path: Path | None = None) -> None:
        """Write to the record at `path`; None writes to memory that nobody reads.

        `OSError` if the file cannot be opened, `ValueError` if it has less than `SIZE` bytes.
        """
        self.is_supervised = path is not None  # a supervisor reads it
        self._pid = os.getpid()
        if path is None:
            self._memory = mmap.mmap(-1, SIZE)
        else:
            with path.open("r+b") as file:
                self._memory = mmap.mmap(file.fileno(), SIZE)
            if _RECORD.unpack_from(self._memory)[2] != self._pid:  # which may open it again
                self._memory[_BYTES:] = self._memory[:_BYTES]
        self._writes, self.phase, self.step, self._first_step, self._run = 0, Phase.START, 0, -1, 0
        self._loss = self._grad_norm = math.nan
        self._seconds, self._longest = [0.0] * len(Phase), [0.0] * len(Phase)
        self._exit: tuple[int, bool, int, int, int, bytes] = (0, False, 0, 0, 0, b"")
        self._since = time.monotonic()
        self._write()

    def enter(self, phase: Phase) -> None:
        """Enter `phase`, unless the exit record is written."""
        if self.phase is Phase.END:
            return
        now, left = time.monotonic(), self.phase
        stay, self._since, self.phase = now - self._since, now, phase
        self._seconds[left] += stay
        self._longest[left] = max(stay, self._longest[left])
        self._write()

    def restart(self) -> None:
        """Count the time from now on: until now this process has waited for its place in a job."""
        self._seconds, self._longest = [0.0] * len(Phase), [0.0] * len(Phase)
        # Written by the next `enter`, as the number of writes is compared between processes.
        self._since = time.monotonic()

    @contextlib.contextmanager
    def within(self, phase: Phase) -> Iterator[None]:
        """Be in `phase` during the block, then in the phase before it."""
        before = self.phase
        self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def start_training(self, step: int, folder: Path) -> None:
        """Record that training of the run in `folder` starts after `step` steps."""
        self.step = self._first_step = step
        self._run = zlib.crc32(os.fsencode(folder.absolute()))
        self._write()

    def complete_step(self, step: int, loss: float, grad_norm: float) -> None:
        """Record that `step` steps are done, and the results of the last one."""
        self.step, self._loss, self._grad_norm = step, loss, grad_norm
        self._write()

    def end(self, status: int, sentence: str, *, is_origin: bool, reason: Reason = Reason.OTHER) -> None:
        """Write the exit record; later ones are ignored."""
        if self.phase is Phase.END:
            return
        content = sentence.encode(errors="backslashreplace")[:_LONGEST_SENTENCE]
        self._exit = (status, is_origin, reason, time.monotonic_ns(), len(content), content)
        self.enter(Phase.END)

    def _write(self) -> None:
        self._writes += 1
        counts = self._writes, self._pid, self.phase, self.step, self._first_step
        results, times = (self._loss, self._grad_norm), (*self._seconds, *self._longest)
        record = _RECORD.pack(_MAGIC, *counts, *results, self._run, *times, *self._exit)
        self._memory[:_BYTES] = record + _CHECKSUM.pack(zlib.crc32(record))


def record_from_environment(environment: Mapping[str, str] = os.environ) -> ProgressRecord:
    """Open the record of this process' supervisor, or make one that nobody reads if there is none."""
    path = environment.get(VARIABLE, "")
    try:
        return ProgressRecord(Path(path) if supervisor_pid(path) else None)
    except (OSError, ValueError):  # the supervisor is gone, and its record with it
        return ProgressRecord()


def supervisor_pid(path: str) -> int | None:
    """Return the process that made the record at `path`; None if it has ended, and another may have its pid."""
    match = re.fullmatch(r"/proc/(\d+)/fd/\d+", path)
    with contextlib.suppress(OSError):
        return int(match[1]) if match and os.readlink(path).startswith(f"/memfd:{NAME}") else None


def end_with_supervisor(environment: Mapping[str, str] = os.environ) -> None:
    """Kill this process' group when its supervisor ends; do nothing without a supervisor.

    The kernel kills the supervisor's own child, but not a trainer behind a shell. The group is that of the command
    which the supervisor started, with its shell and data workers.
    """
    pid = supervisor_pid(environment.get(VARIABLE, ""))
    if pid is None:
        return
    with contextlib.suppress(OSError):  # it has ended; its child is killed in any case
        ended = select.poll()
        ended.register(os.pidfd_open(pid), select.POLLIN)
        threading.Thread(target=_kill_after, args=(ended,), name="supervisor", daemon=True).start()


def _kill_after(ended: select.poll) -> None:
    ended.poll()
    os.killpg(0, signal.SIGKILL)


def read_progress(file: int, *, before: bool = False) -> Progress | None:
    """Read the record in the open file `file`; None if it is empty, torn or damaged.

    `before` reads the copy of what the process before the current one left.
    """
    for _ in range(3):  # a write may be in progress
        content = os.pread(file, _BYTES, _BYTES if before else 0)
        if len(content) < _BYTES or not content.startswith(_MAGIC):
            return None
        record, checksum = content[: _RECORD.size], content[_RECORD.size :]
        if checksum == _CHECKSUM.pack(zlib.crc32(record)):
            _, writes, pid, phase, step, first, loss, norm, run, *rest = _RECORD.unpack(record)
            *times, status, is_origin, reason, time_ns, length, sentence = rest
            text = sentence[:length].decode(errors="replace")
            seconds, longest = tuple(times[: len(Phase)]), tuple(times[len(Phase) :])
            with contextlib.suppress(ValueError):  # another version's phase or reason
                end = ExitRecord(status, text, bool(is_origin), time_ns, Reason(reason)) if phase == Phase.END else None
                return Progress(writes, pid, Phase(phase), step, first, loss, norm, seconds, longest, end, run)
    return None
