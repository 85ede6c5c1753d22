"""A sink that may fail: training continues, and the rows that it missed follow from the run's own files."""

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from zaya_jax.run.files import read_file, write_atomically
from zaya_jax.run.folder import METRICS, TIMINGS
from zaya_jax.run.metrics import MetricSink, read_rows
from zaya_jax.run.writing import make_folder

Open = Callable[[int], MetricSink]
Say = Callable[[str], object]
_PATIENCE = 20  # times as long as an attempt to open a sink took, until the next one: it takes 5 % of the time at most


class Mirror(MetricSink):
    """Passes the rows of a run to a sink. If the sink fails, it is opened again at a later checkpoint."""

    def __init__(
        self, name: str, open_sink: Open, folder: Path, first: int, step: int, say: Say, *, rewinds: bool
    ) -> None:
        """Open the sink `name`: `open_sink` opens it after a step. `say` reports when failures begin and end.

        The run continues after `step`; `first` steps were done before this run folder's first. The folder has all rows;
        `NAME/synced_step` in it has the last step that the sink has. If the sink `rewinds`, opening it after a step
        drops its later rows; other sinks keep them, and do not get them again.
        """
        self._name, self._open_sink, self._folder, self._say = name, open_sink, folder, say
        self._sink: MetricSink | None = None
        self._synced_file = folder / name / "synced_step"
        self._safe = first
        with contextlib.suppress(OSError, ValueError):  # without it, the sink gets all rows
            self._safe = max(first, int(read_file(self._synced_file)))
        self._newest, self._fails, self._retry_at = step, False, 0.0
        self._closing = False
        if rewinds:
            self._safe = min(self._safe, step)
        elif self._safe > step:
            kept = f"keeps the rows that it has of steps {step + 1} to {self._safe}"
            say(f"train.sinks: {name} {kept}; training repeats these steps, and only {METRICS} gets their new rows.")
        with self._failures_reported():
            self._open()

    def write(self, metrics: dict[str, Any], timings: dict[str, Any]) -> None:
        """Write the row of a step, unless the sink has it, or has failed since the last checkpoint."""
        self._newest = metrics["step"]
        if self._sink is not None and self._newest > self._safe:
            with self._failures_reported():
                self._sink.write(metrics, timings)

    def sync(self) -> str:
        """Flush the sink, after opening it again if it has failed. No failure keeps a checkpoint from being saved."""
        if self._sink is None and time.monotonic() < self._retry_at:
            return ""
        with self._failures_reported():
            (self._sink or self._open()).sync()
            self._safe = max(self._safe, self._newest)
            self._record()
            if self._fails:
                self._say(f"train.sinks: {self._name} works again and has all rows.")
            self._fails = False
        return ""

    def close(self) -> None:
        """Close the sink. One that has failed is not opened again, since the process may have to end soon."""
        self._closing = True
        if self._sink is not None:
            self.sync()
        if self._sink is not None:
            with self._failures_reported():
                self._sink.close()
        if self._safe < self._newest:
            lacks = f"lacks the rows after step {self._safe}"
            self._say(f"train.sinks: {self._name} {lacks}; rerunning the command writes them.")

    def _open(self) -> MetricSink:
        start = time.monotonic()
        try:
            self._record()  # before the sink drops later rows
            sink = self._open_sink(self._safe)
        finally:
            self._retry_at = time.monotonic() + _PATIENCE * (time.monotonic() - start)
        try:
            for metrics, timings in self._missing():
                sink.write(metrics, timings)
        except BaseException:
            with contextlib.suppress(Exception):
                sink.close()
            raise
        self._sink = sink
        return sink

    def _record(self) -> None:
        make_folder(self._synced_file.parent)
        write_atomically(self._synced_file, f"{self._safe}\n")

    def _missing(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        if self._safe >= self._newest:
            return []
        timings = {row["step"]: row for row in read_rows(self._folder / TIMINGS)}
        rows = [row for row in read_rows(self._folder / METRICS) if row["step"] > self._safe]
        if not rows or rows[-1]["step"] < self._newest:  # on a full disk, the newest rows are in memory
            raise OSError(f"{METRICS} has no row of step {self._newest} yet")
        return [(row, timings.get(row["step"], {})) for row in rows]

    @contextlib.contextmanager
    def _failures_reported(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            sink, self._sink = self._sink, None
            if sink is not None:
                with contextlib.suppress(Exception):
                    sink.close()
            if not self._fails:
                reason = " ".join(str(error).split())[:300].removesuffix(".") or type(error).__name__
                rows = f"{METRICS} has all rows."
                if not self._closing:
                    rows = f"Training continues; {rows} zaya_jax tries {self._name} again after a later checkpoint."
                self._say(f"train.sinks: {self._name} failed: {reason}. {rows}")
            self._fails = True


def scalars(row: dict[str, Any], prefix: str = "") -> dict[str, int | float]:
    """Return the numbers of a row by name: `name/key` for each key of a section, and the mean over layers of a list."""
    numbers: dict[str, int | float] = {}
    for key, value in row.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            numbers |= scalars(value, f"{name}/")
        elif isinstance(value, list) and value and all(isinstance(item, float) for item in value):
            numbers[name] = sum(value) / len(value)
        elif isinstance(value, int | float) and key != "step":
            numbers[name] = value
    return numbers
