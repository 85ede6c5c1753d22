"""`metrics.jsonl`: one row a step, whatever happened to the process in between.

Rows hold nothing that depends on time or machine load, so that two runs of one configuration can be
compared bitwise.
"""

import json
import math
import os
from pathlib import Path
from typing import Any, Self

from zaya_jax.errors import InputError
from zaya_jax.files import write_atomically


class JsonlTracker:
    """Appends rows; a run that goes on from step n first drops what stands after n (`dropped` rows)."""

    def __init__(self, path: Path, step: int, first: int = 0) -> None:
        """Open the file `path` of a run that began after step `first` and has come to `step`.

        Raises:
          InputError: the row of one of these steps is missing or cannot be read; the file is left as it is.
        """
        rows = read_rows(path)
        kept = [row for row in rows if first < row["step"] <= step]
        for index, expected in enumerate(range(first + 1, step + 1)):
            if index >= len(kept) or kept[index]["step"] != expected:
                raise InputError(
                    f"{path} should hold a row for each of the {step - first} steps of the newest checkpoint, but that "
                    f"of step {expected} is missing or damaged. Bring the file back, or choose another run_dir."
                )
        self.dropped = len(rows) - len(kept)
        write_atomically(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file = path.open("a", encoding="utf-8")

    def __enter__(self) -> Self:
        """Close at the end of a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._file.close()

    def log(self, row: dict[str, Any]) -> None:
        """Write one row, null where a number is not finite; it outlives the process from here on."""
        self._file.write(json.dumps(_finite(row), allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Bring all rows to the disk, so that no checkpoint can be newer than its rows."""
        os.fsync(self._file.fileno())


class NoTracker:
    """Notes nothing: the rows of a job of several processes are written by the first."""

    dropped = 0

    def __enter__(self) -> Self:
        """Nothing to close."""
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def log(self, row: dict[str, Any]) -> None:
        """Leave the row to the first process."""

    def sync(self) -> None:
        """There is nothing to bring to the disk."""


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows up to the first that is cut off (by a kill) or damaged."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        if not isinstance(row, dict) or "step" not in row:
            break
        rows.append(row)
    return rows
