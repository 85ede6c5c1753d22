"""`metrics.jsonl` and `timings.jsonl`: one row per step, whatever happens to the process or the disk in between.

Rows of `metrics.jsonl` contain nothing that depends on time or machine load, so that two runs of one configuration can
be compared bitwise; times are in `timings.jsonl`.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from zaya_jax.errors import InputError

_SYNC_BYTES = 2**20  # rows kept in memory before they are synced, where checkpoints are rare


class DiskGuard:
    """Writes files of the run folder that training can wait for: a failure is one warning, not the end of the run."""

    def __init__(self, say: Callable[[str], object]) -> None:
        """Report to `say`: one sentence when writing begins to fail, one when every file has been written again."""
        self.say = say
        self._failed: dict[Path, str] = {}

    @contextlib.contextmanager
    def writing(self, path: Path) -> Iterator[None]:
        """Suppress and report an `OSError` while `path` is being written."""
        failing = len(self._failed) > 0
        try:
            yield
        except OSError as error:
            self._failed[path] = f"{path} cannot be written: {error.strerror or error}."
            if not failing:
                self.say(f"{self._failed[path]} Training continues; what could not be written is kept in memory and "
                          "written when there is room.")  # fmt: skip
        else:
            self._failed.pop(path, None)
            if failing and not self._failed:
                self.say(f"{path.parent} can be written again; no row is missing.")

    def problem(self, path: Path) -> str:
        """The sentence about the last failure to write `path`; empty if it is written."""
        return self._failed.get(path, "")


class MetricSink(Protocol):
    """Where the metrics of a run go. Nothing that it cannot write for now, as on a full disk, ends the run."""

    def write(self, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
        """Take the row of a step: its numbers, and beside them what depends on time and machine load."""
        ...

    def sync(self) -> str:
        """Bring all rows to the disk, before a checkpoint that is newer; a sentence if that fails."""
        ...

    def close(self) -> None:
        """Write what is left; no row follows."""
        ...


class JsonlSink:
    """`metrics.jsonl` and `timings.jsonl` of a run."""

    def __init__(self, metrics: "JsonlFile", timings: "JsonlFile") -> None:
        """Write to both files, and close them."""
        self._metrics, self._timings = metrics, timings

    def write(self, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
        """Append a row to each file."""
        self._metrics.append(metrics)
        self._timings.append(timings)

    def sync(self) -> str:
        """Bring all rows to the disk; a sentence if that fails for `metrics.jsonl`, which resuming needs."""
        self._timings.sync()
        return self._metrics.sync()

    def close(self) -> None:
        """Close both files."""
        self._metrics.close()
        self._timings.close()


class JsonlFile:
    """Appends rows; a run that resumes after step n first drops the rows after n (`dropped` of them).

    Rows that cannot be written, or that were written but not synced, stay in memory until they are on the disk.
    """

    def __init__(self, path: Path, step: int, first: int, disk: DiskGuard, *, complete: bool = False) -> None:
        """Open the file `path` of a run that started after `first` steps and resumes after `step`, or create it.

        `disk` reports failures.

        Raises:
          InputError: the file must be `complete`, and the row of a step from `first` to `step` is missing or damaged;
            the file is left as it is.
        """
        self._path, self._disk = path, disk
        rows = list(_parse(path.read_bytes())) if path.exists() else []
        # A run that has no checkpoint of its own starts anew, and may start after another step than the last time.
        kept = [(row, end) for row, end in rows if row["step"] <= step] if step > first else []
        if complete:
            self._check([row["step"] for row, _ in kept], range(first + 1, step + 1))
        self.dropped = len(rows) - len(kept)
        self._file: int | None = None
        self._synced = kept[-1][1] if kept else 0  # bytes of the file that are on the disk
        self._rows = bytearray()  # after them
        self._written = 0  # bytes of `_rows` that the file has
        self._write()

    def _check(self, steps: list[int], expected: range) -> None:
        for index, step in enumerate(expected):
            if index >= len(steps) or steps[index] != step:
                raise InputError(
                    f"{self._path} must have a row for each of the {len(expected)} steps of the newest checkpoint, but "
                    f"the row of step {step} is missing or damaged. Restore the file, or choose another run_dir."
                )

    def close(self) -> None:
        """Write what is left and close the file."""
        self._write()
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def append(self, row: dict[str, Any]) -> None:
        """Write one row, null where a number is not finite; from here on it outlives the process."""
        self._rows += (json.dumps(finite(row), allow_nan=False) + "\n").encode()
        self._write()
        if len(self._rows) > _SYNC_BYTES:
            self.sync()

    def sync(self) -> str:
        """Bring all rows to the disk, so that no checkpoint is newer than its rows; a sentence if that fails."""
        self._write()
        if self._file is not None and self._written == len(self._rows):
            with self._disk.writing(self._path):
                try:
                    os.fsync(self._file)
                except OSError:
                    self._written = 0  # the system may have dropped any of it
                    raise
                self._synced, self._rows, self._written = self._synced + self._written, bytearray(), 0
        return self._disk.problem(self._path)

    def _write(self) -> None:
        with self._disk.writing(self._path):
            if self._file is None:
                file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
                os.ftruncate(file, self._synced)  # needs no room on a full disk
                self._file = file
            while self._written < len(self._rows):
                rest = bytes(self._rows[self._written :])
                self._written += os.pwrite(self._file, rest, self._synced + self._written)


def finite(value: Any) -> Any:
    """`value` for JSON: null where a number is not finite."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows up to the first that is cut off (by a kill) or damaged."""
    return [row for row, _ in _parse(path.read_bytes())] if path.exists() else []


def _parse(content: bytes) -> Iterator[tuple[dict[str, Any], int]]:
    """Each row up to the first that is cut off or damaged, and where in `content` its line ends."""
    end = 0
    for line in content.splitlines(keepends=True):
        end += len(line)
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            return
        if not line.endswith(b"\n") or not isinstance(row, dict) or not isinstance(row.get("step"), int):
            return
        yield row, end
