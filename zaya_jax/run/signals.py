"""Immediate handling of Ctrl-C (SIGINT), SIGTERM and SIGHUP, even while the main thread imports, compiles or waits.

Python runs signal handlers between two bytecode instructions of the main thread, which can take seconds. Exceptions
that a handler raises can be swallowed or end in a traceback during imports and shutdown. So a signal also writes its
number to a pipe, and a thread reads the pipe.
"""

import contextlib
import functools
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn, Self

from zaya_jax.errors import ExitCode, printable
from zaya_jax.run.typed_name import typed_name

Handler = Callable[[int, FrameType | None], object]
# SIGHUP comes when the terminal or the ssh session of a run is lost.
NAMES: dict[int, str] = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}

_ONE_PRESS = 0.2  # seconds: `timeout` and launchers signal a process and its group


class Listener:
    """Calls `answer` in a separate thread for each signal of `NAMES` inside a `with` block; blocks can nest.

    Later, `handler` is called in the main thread, as a regular signal handler. Outside the main thread a listener does
    nothing, because only the main thread can set signal handlers.
    """

    _numbers = tuple(NAMES)  # the signals that `handler` gets

    def __init__(self, answer: Callable[[int], object], handler: Handler = lambda number, frame: None) -> None:
        self._answer, self._handler = answer, handler
        self.before: dict[int, Any] = {}  # previous handlers
        self._outer = -1  # the pipe of the enclosing listener

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        _open.append(self)
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._thread = threading.Thread(target=self._read, name="signals", daemon=True)
        self._thread.start()
        self._outer = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        # Keep ignored signals ignored: shells make background jobs ignore Ctrl-C.
        handled = [number for number in self._numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self.before = {number: signal.signal(number, self._handler) for number in handled}
        return self

    def __exit__(self, *_: object) -> None:
        if self not in _open:
            return
        _open.remove(self)
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
        """True if another listener encloses this one."""
        return self._outer >= 0

    def pass_on(self, number: int) -> None:
        """Forward a signal to the enclosing listener."""
        if self.nested:
            os.write(self._outer, bytes([number]))

    def _read(self) -> None:
        while (number := os.read(self._reader, 1)[0]) != 0:
            if number in NAMES:
                self._answer(number)


_open: list[Listener] = []  # whose blocks are entered


def _leave_to_child() -> None:
    """Reset a forked child, which would otherwise write to its parent's pipe."""
    if _open:
        signal.set_wakeup_fd(-1)
        for number in {number for listener in _open for number in listener.before}:
            signal.signal(number, signal.SIG_DFL)
        _open.clear()


os.register_at_fork(after_in_child=_leave_to_child)


class Interrupts(Listener):
    """Raises `KeyboardInterrupt` at Ctrl-C inside a `with` block, as Python does; blocks can nest.

    With `exits`, a second Ctrl-C exits at once.
    """

    _numbers = (signal.SIGINT,)
    _deadline = math.inf  # after which a press is a second one
    _repeat: threading.Thread | None = None

    def __init__(self, *, exits: bool = True) -> None:
        super().__init__(self._receive if exits else lambda number: None, signal.default_int_handler)
        Interrupts._deadline = math.inf

    def __exit__(self, *error: object) -> None:
        try:
            if self._repeat is not None:
                self._repeat.join()  # so that the press arrives inside this block
        finally:
            super().__exit__(*error)

    def _receive(self, number: int) -> None:
        # A supervisor, which runs inside such a block, replaces the handler.
        if number == signal.SIGINT and signal.getsignal(number) is self._handler:
            if (now := time.monotonic()) > self._deadline:
                say_and_exit("Stopped by Ctrl-C.", ExitCode.INTERRUPTED)
            Interrupts._deadline = min(self._deadline, now + _ONE_PRESS)

    @classmethod
    def repeat(cls) -> None:
        """Send Ctrl-C again, after a `KeyboardInterrupt` that Python dropped."""
        cls._deadline = math.inf
        press = threading.main_thread().ident or 0, signal.SIGINT
        cls._repeat = threading.Timer(0.01, signal.pthread_kill, press)  # what is raised now is dropped, too
        cls._repeat.start()


def ignore_signals() -> None:
    """Ignore late signals: at the end Python restores the default handlers, which would replace the exit status."""
    for number in NAMES:
        signal.signal(number, signal.SIG_IGN)


@contextlib.contextmanager
def interrupts_kept_from_children() -> Iterator[None]:
    """Block Ctrl-C and SIGHUP in processes started inside the block: both go to the whole process group."""
    from multiprocessing import resource_tracker

    # Threads and processes inherit the mask. The tracker cleans up shared memory of killed processes; silence its
    # warning about that. It ignores SIGINT itself, and starting it unblocks SIGINT here.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")
    resource_tracker.ensure_running()
    sys.warnoptions.pop()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def warn(sentence: str) -> None:
    """Print `sentence` to standard error, which may be closed, as by `tee` at Ctrl-C."""
    try:
        print(_printable(sentence), file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # or Python fails to flush at exit and changes the status


warn_once = functools.lru_cache(20)(warn)  # repeats a sentence after twenty others


def flush_output() -> None:
    """Flush standard output, which may be closed."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()


def say_and_exit(sentence: str, status: int) -> NoReturn:
    """Print a sentence and `exit_at_once`, from any thread."""
    print_error(sentence)
    exit_at_once(status)


def print_error(sentence: str) -> None:
    """Flush stdout, then print to stderr, from any thread; both may be closed."""
    flush = threading.Thread(target=flush_output, daemon=True)  # flushing blocks if nobody reads the pipe
    with contextlib.suppress(RuntimeError):  # no memory or process is left for a thread
        flush.start()
        flush.join(1)
    with contextlib.suppress(OSError):
        os.write(2, f"{_printable(sentence)}\n".encode())


def _printable(sentence: str) -> str:
    # The items of a list are lines of their own.
    return "\n  ".join(map(printable, typed_name(sentence).split("\n  ")))


def exit_at_once(status: int) -> NoReturn:
    """End this process and its children without waiting for threads or files."""
    if "multiprocessing" in sys.modules:
        for child in sys.modules["multiprocessing"].active_children():
            child.kill()
    os._exit(status)
