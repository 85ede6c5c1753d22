"""Progress over bytes of input: a bar on a terminal, a line every half minute elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

_LINE_EVERY = 30.0  # seconds
_POLL_EVERY = 0.2  # seconds


class WorkProgress:
    """Bytes done of a total, with rate and time left; a context manager."""

    def __init__(self, label: str, total: int) -> None:
        """Prepare to report on stderr how much of `total` bytes is done."""
        console = Console(file=sys.stderr, highlight=False, soft_wrap=True)
        self._label, self._total, self._done = label, total, 0
        self._bar = Progress(
            TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(),
            TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True,
        )  # fmt: skip
        self._task = self._bar.add_task(label, total=total)
        self._lines = not console.is_terminal
        self._started = self._reported = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._bar.stop()
        if kind is None and self._total:
            self._line("done")

    def add(self, count: int) -> None:
        """Note `count` more bytes."""
        self.reach(self._done + count)

    def reach(self, done: int) -> None:
        """Note that `done` bytes are done."""
        self._done = done
        self._bar.update(self._task, completed=done)
        if self._lines and time.monotonic() - self._reported >= _LINE_EVERY:
            self._reported = time.monotonic()
            elapsed = self._reported - self._started
            left = f"{(self._total - done) * elapsed / done:.0f} s left" if done else "just started"
            self._line(f"{100 * done / max(self._total, 1):.0f} %, {left}")

    @contextmanager
    def follow(self, poll: Callable[[], int]) -> Iterator[None]:
        """Within the block, take the bytes that are done from `poll`, several times a second."""
        finished = threading.Event()

        def report() -> None:
            while not finished.wait(_POLL_EVERY):
                self.reach(poll())

        thread = threading.Thread(target=report, daemon=True)
        thread.start()
        try:
            yield
        finally:
            finished.set()
            thread.join()
            self.reach(poll())

    def _line(self, state: str) -> None:
        seconds = max(time.monotonic() - self._started, 1e-9)
        print(f"data: {self._label}: {state}, {self._done / 1e6:,.1f} MB in {seconds:.1f} s "
              f"({self._done / 1e6 / seconds:,.1f} MB/s)", file=sys.stderr, flush=True)  # fmt: skip
