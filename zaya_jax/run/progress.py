"""Status lines, and progress bars with rate and ETA, on terminals only."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Self, TextIO, TypeVar, cast

from rich import progress
from rich.console import Console
from rich.text import Text

from zaya_jax.errors import printable
from zaya_jax.run.command_output import Unescaped

T = TypeVar("T")

_LINE_EVERY = 30.0  # seconds
_POLL_EVERY = 0.2  # seconds


def _console() -> Console:
    return Console(file=cast(TextIO, Unescaped(sys.stderr)), highlight=False, soft_wrap=True)


def _bar(console: Console, show: bool, *columns: progress.ProgressColumn) -> progress.Progress:
    """Return a bar, shown on terminals only, with a label, some columns, and the remaining time."""
    all_columns = progress.TextColumn("{task.description}", markup=False), progress.BarColumn(), *columns
    left, hidden = progress.TimeRemainingColumn(), not (show and console.is_terminal)
    return progress.Progress(*all_columns, left, console=console, disable=hidden, transient=True)


class WorkProgress:
    """Shows bytes done of a total on stderr, with rate and ETA; a context manager, safe to use from several threads."""

    def __init__(self, label: str, total: int, *, log: str = "", show: bool = True) -> None:
        """Create the bar of `total` bytes to do, labelled with what is being done, such as 'verifying'.

        Without a terminal, and at the end, lines that begin with `log` are printed every half minute, unless it is
        empty. All processes but one hide the bar (`show`).
        """
        console = _console()
        self._label, self._total, self._done = printable(label), total, 0
        self._bar = _bar(console, show, progress.DownloadColumn(), progress.TransferSpeedColumn())
        self._task = self._bar.add_task(self._label, total=total)
        self._log, self._is_terminal, self._lock = log, console.is_terminal, threading.Lock()
        self._started = self._reported = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self._bar.stop()
        if self._log and kind is None and self._total:
            self._line("done")

    def add(self, count: int) -> None:
        """Count `count` more bytes as done."""
        with self._lock:
            self.reach(self._done + count)

    def reach(self, done: int) -> None:
        """Set the number of bytes done."""
        self._done = done
        self._bar.update(self._task, completed=done)
        if self._log and not self._is_terminal and time.monotonic() - self._reported >= _LINE_EVERY:
            self._reported = time.monotonic()
            elapsed = self._reported - self._started
            left = f"{(self._total - done) * elapsed / done:.0f} s left" if done else "just started"
            self._line(f"{100 * done / max(self._total, 1):.0f} %, {left}")

    @contextmanager
    def follow(self, poll: Callable[[], int]) -> Iterator[None]:
        """Within the block, read the bytes done from `poll` several times a second."""
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
        seconds, megabytes = max(time.monotonic() - self._started, 1e-9), self._done / 1e6
        done = f"{megabytes:,.1f} MB in {seconds:.1f} s ({megabytes / seconds:,.1f} MB/s)"
        print(f"{self._log}: {self._label}: {state}, {done}", file=sys.stderr, flush=True)


@contextmanager
def show_status(label: str) -> Iterator[None]:
    """Show a status line such as 'generating the first tokens' on a terminal while the block runs."""
    console = _console()
    with console.status(Text(label)) if console.is_terminal else nullcontext():
        yield


def track(label: str, items: Sequence[T], name: Callable[[T], str]) -> Iterator[T]:
    """Yield the items with a bar on stderr that shows the current one's name, the count done, elapsed time and ETA.

    Without a terminal, prints a line for each item.
    """
    console = _console()
    with _bar(console, True, progress.MofNCompleteColumn(), progress.TimeElapsedColumn()) as bar:
        task = bar.add_task(label, total=len(items))
        for item in items:
            bar.update(task, description=printable(f"{label} {name(item)}"))
            if not console.is_terminal:
                print(f"{label} {name(item)}", file=sys.stderr, flush=True)
            yield item
            bar.advance(task)
