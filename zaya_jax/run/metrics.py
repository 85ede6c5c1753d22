"""`metrics.jsonl` and `timings.jsonl`: exactly one row per step, even after kills and full disks.

`metrics.jsonl` contains nothing that depends on time or machine load, so two runs of one configuration can be compared
bitwise. Times are in `timings.jsonl`.
"""

import abc
import contextlib
import errno
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zaya_jax.errors import InputError, as_sentence
from zaya_jax.run.files import read_end, read_file
from zaya_jax.run.writing import make_folder, open_file

_TAIL = 2**18  # bytes in which the last row is looked for
_SYNC_BYTES = 2**20  # of rows in memory that trigger a sync between checkpoints


class DiskGuard:
    """Turns failures to write non-critical files of the run folder into one warning instead of ending the run."""

    def __init__(self, say: Callable[[str], object], check: Callable[[], object] = lambda: None) -> None:
        self.say = say  # reports when writing starts to fail, and when every file is written again
        self._check = check  # raises `Superseded` if other processes have resumed the run
        self._failed: dict[Path, str] = {}

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Suppress and report an `OSError` while `path` is being written."""
        self._check()
        failing = len(self._failed) > 0
        try:
            yield
        except OSError as error:
            if error.errno == errno.EPERM:  # `writing` refuses what another user put there
                raise
            error.filename = None  # the message has `path`
            self._failed[path] = f"{path} cannot be written: {as_sentence(error)}"
            if not failing:
                self.say(f"{self._failed[path]} Training continues; rows wait in memory until the disk accepts them.")
        else:
            self._failed.pop(path, None)
            if failing and not self._failed:
                self.say(f"{path.parent} can be written again; no row is missing.")

    def problem(self, path: Path) -> str:
        """Return the message about the last failure to write `path`; empty if it is written."""
        return self._failed.get(path, "")


class MetricSink(abc.ABC):
    """A destination for metrics. Failures to write, as on a full disk, must not end the run."""

    @abc.abstractmethod
    def write(self, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
        """Write the row of a step; `timings` contains what depends on time and machine load."""

    def sync(self) -> str:
        """Flush all rows to disk before a checkpoint is saved; return a message if that fails."""
        return ""

    @abc.abstractmethod
    def close(self) -> None:
        """Write pending rows; no row follows."""


class JsonlSink(MetricSink):
    """`metrics.jsonl` and `timings.jsonl` of a run."""

    def __init__(self, metrics: "JsonlFile", timings: "JsonlFile") -> None:
        self._metrics, self._timings = metrics, timings

    def write(self, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
        """Append a row to each file."""
        self._metrics.append(metrics)
        self._timings.append(timings)

    def sync(self) -> str:
        """Flush both files; return a message if that fails for `metrics.jsonl`, which resuming needs."""
        self._timings.sync()
        return self._metrics.sync()

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._timings.close()


class LineFile:
    """Appends lines to a file: each survives a kill of the process, and waits in memory while the disk refuses it.

    Lines stay in memory until they are synced, since a sync that fails may lose what was written.
    """

    def __init__(self, path: Path, size: int, disk: DiskGuard) -> None:
        """Open or create the file, and drop all but its first `size` bytes; `disk` reports failures."""
        self._path, self._disk = path, disk
        self._file: int | None = None
        self._synced = size  # bytes of the file that are synced
        self._lines = bytearray()  # lines after those bytes
        self._written = 0  # bytes of `_lines` already written, but not synced
        self.flush()

    @property
    def waiting(self) -> int:
        """Number of bytes that the disk has not accepted."""
        return len(self._lines) - self._written

    def close(self) -> None:
        """Write what waits, and close the file; the second time, do nothing, since others may write it by then."""
        if self._file is not None or self.waiting:
            self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def append_line(self, line: bytes) -> None:
        """Write one line."""
        self._lines += line
        self.flush()
        if len(self._lines) > _SYNC_BYTES:
            self.sync()

    def sync(self) -> str:
        """Flush all lines to disk; return a message if that fails."""
        self.flush()
        if self._file is not None and not self.waiting:
            with self._disk.writing(self._path):
                try:
                    os.fsync(self._file)
                except OSError:
                    self._written = 0  # the kernel may have dropped any part of it
                    raise
                self._synced, self._lines, self._written = self._synced + self._written, bytearray(), 0
        return self._disk.problem(self._path)

    def flush(self) -> None:
        """Write what waits."""
        with self._disk.writing(self._path):
            if self._file is None:
                file = open_file(self._path, os.O_RDWR)
                os.ftruncate(file, self._synced)  # works on a full disk
                self._file = file
            while self.waiting:
                rest = bytes(self._lines[self._written :])
                self._written += os.pwrite(self._file, rest, self._synced + self._written)


class JsonlFile(LineFile):
    """A file with a row per step. A run that resumes after step n first drops the rows after n (`dropped` of them).

    Rows are synced before a checkpoint is saved, so that no checkpoint is newer than its rows.
    """

    def __init__(self, path: Path, step: int, first: int, disk: DiskGuard, *, complete: bool = False) -> None:
        """Open or create the file of a run that started after step `first` and resumes after `step`.

        If it must be `complete` up to there, but is not, this raises `InputError` and leaves it unchanged.
        """
        rows = list(_parse(read_file(path))) if path.exists() else []
        # Until its first checkpoint a run starts over, and `resume_from` may then name a checkpoint of another step.
        kept = [(row, end) for row, end in rows if row["step"] <= step] if step > first else []
        steps = itertools.zip_longest(range(first + 1, step + 1), (row["step"] for row, _ in kept))
        if complete and (missing := next((expected for expected, actual in steps if expected != actual), None)):
            required = f"{path} must have a row for each of the {step - first} steps up to the newest checkpoint"
            remedy = "Restore the file, or choose another run_dir."
            raise InputError(f"{required}, but the row of step {missing} is missing or damaged. {remedy}")
        self.dropped = len(rows) - len(kept)
        super().__init__(path, kept[-1][1] if kept else 0, disk)

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, with null for numbers that are not finite."""
        self.append_line(_line(row))


def _line(row: dict[str, Any]) -> bytes:
    return (json.dumps(finite(row), allow_nan=False) + "\n").encode()


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Append a line of JSON durably, after cutting off a line that a kill or a full disk left incomplete."""
    make_folder(path.parent)
    with open(open_file(path, os.O_RDWR | os.O_APPEND), "ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(_line(row))
        file.flush()
        os.fsync(file.fileno())


def finite(value: Any) -> Any:
    """Replace numbers that are not finite with None, for JSON."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Read the rows up to the first one that is truncated (by a kill) or damaged."""
    return [row for row, _ in _parse(read_file(path))] if path.exists() else []


def read_last_row(path: Path) -> dict[str, Any]:
    """Return the last complete row among the last 256 KiB of a file of rows; empty if there is none."""
    lines = reversed(read_end(path, _TAIL).splitlines(keepends=True))
    return next((row for line in lines if (row := parse_row(line)) is not None), {})


def parse_row(line: bytes) -> dict[str, Any] | None:
    """Parse a line of a file of rows; None if it is truncated (by a kill) or damaged."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if line.endswith(b"\n") and isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _parse(content: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """Yield each row up to the first truncated or damaged one, and the offset in `content` where its line ends."""
    end = 0
    for line in content.splitlines(keepends=True):
        end += len(line)
        row = parse_row(line)
        if row is None:
            return
        yield row, end
