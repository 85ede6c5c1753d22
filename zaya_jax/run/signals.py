"""Ctrl-C (SIGINT) and SIGTERM, answered at once, whatever the main thread is at: importing, compiling, or waiting.

Python runs the handler of a signal between two instructions of the main thread, which may be seconds away, and an
exception that it raises can be swallowed or end in a traceback, as during imports and at the end of the process. So a
signal also writes its number into a pipe, and a thread reads that.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, Self

from zaya_jax.errors import ExitCode

NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}


def exit_status(number: int) -> ExitCode:
    """The exit status of a process that a signal of `NAMES` ends, as shells have it."""
    return ExitCode(128 + number)


class Listener:
    """Calls a function in a thread of its own for each signal that comes inside a `with` block; blocks may nest.

    In another thread than the main one, which alone may set handlers, signals do what they did before.
    """

    def __init__(
        self, answer: Callable[[int], object],
        handler: Callable[[int, FrameType | None], object] = lambda number, frame: None,
        numbers: tuple[int, ...] = tuple(NAMES),
    ) -> None:  # fmt: skip
        """Listen to nothing yet.

        Args:
          answer: is given the number of each signal, at once and in another thread.
          handler: is called in the main thread, when that comes to it.
          numbers: of the signals.
        """
        self._answer, self._handler, self._numbers = answer, handler, numbers
        self.before: dict[int, Any] = {}  # handlers of the main thread
        self._open = False
        self._outer = -1  # the pipe of the listener around this one

    def __enter__(self) -> Self:
        """Begin to listen."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self._open = True
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)
        self._thread.start()
        self._outer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # What is ignored stays so: a shell has its background jobs ignore Ctrl-C.
        heard = [number for number in self._numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self.before = {number: signal.signal(number, self._handler) for number in heard}
        os.register_at_fork(after_in_child=self._leave_to_child)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave signals to whoever had them before."""
        if not self._open:
            return
        self._open = False
        for number, handler in self.before.items():
            signal.signal(number, handler)
        self.before = {}
        signal.set_wakeup_fd(self._outer)
        os.write(self._writer, bytes(1))
        self._thread.join()
        os.close(self._writer)
        os.close(self._reader)

    @property
    def nested(self) -> bool:
        """Whether there is a listener around this one."""
        return self._outer >= 0

    def pass_on(self, number: int) -> None:
        """Let the listener around this one answer."""
        if self.nested:
            os.write(self._outer, bytes([number]))

    def _read(self) -> None:
        while (number := os.read(self._reader, 1)[0]) != 0:
            if number in self._numbers:
                self._answer(number)

    def _leave_to_child(self) -> None:
        """In a forked process, which would write into this one's pipe."""
        if self._open:
            self._open = False
            signal.set_wakeup_fd(-1)
            for number in self.before:
                signal.signal(number, signal.SIG_DFL)


def ignore_signals() -> None:
    """Ignore Ctrl-C and SIGTERM from here on, for the last moments of a process whose exit status is decided.

    Python restores their default handlers while it finalizes, so that a late signal would replace the status.
    """
    for number in NAMES:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def interrupts_kept_from_children() -> Iterator[None]:
    """Processes started in this block leave Ctrl-C, which a terminal sends to all, to this one."""
    from multiprocessing import resource_tracker

    # The tracker removes what killed processes leave in shared memory, and nobody need be warned of that. It is started
    # first, since doing so unblocks signals.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    resource_tracker.ensure_running()
    sys.warnoptions.pop()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # which threads and processes inherit
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def warn(sentence: str) -> None:
    """Print `sentence` to standard error, which its reader may have closed, as `tee` does at Ctrl-C."""
    try:
        print(sentence, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # else Python fails to flush at exit, and changes the status


def flush_output() -> None:
    """Flush standard output, which may be closed, or whose reader may have ended."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()


def say_and_exit(sentence: str, status: int) -> NoReturn:
    """End this process at once with a sentence, from any thread; processes that it started are ended, too."""
    print_error(sentence)
    exit_at_once(status)


def print_error(sentence: str) -> None:
    """Print to stderr after what stdout has, from any thread, also where either is closed."""
    flush = threading.Thread(target=flush_output, daemon=True)  # since nobody may be reading what is printed
    flush.start()
    flush.join(1)
    with contextlib.suppress(OSError):
        os.write(2, f"{sentence}\n".encode())


def exit_at_once(status: int) -> NoReturn:
    """End this process and those that it started, without waiting for threads or files."""
    if "multiprocessing" in sys.modules:
        for child in sys.modules["multiprocessing"].active_children():
            child.kill()
    os._exit(status)
