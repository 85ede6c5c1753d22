"""Start and end of every command: output that cannot fail it, and one sentence for what ends it."""

import atexit
import errno
import faulthandler
import io
import os
import re
import select
import signal
import stat
import sys
import warnings
from collections.abc import Callable
from typing import Any

from zaya_jax.errors import ExitCode, as_sentence, exit_message, is_expected, visible
from zaya_jax.hardware.detection import use_huge_pages
from zaya_jax.run.progress_record import record_from_environment
from zaya_jax.run.signals import NAMES, Interrupts, Listener, flush_output, ignore_signals, say_and_exit, warn

_GONE = {errno.EPIPE, errno.ESHUTDOWN, errno.ECONNRESET}  # the reader of a pipe ended (`| head`)
_outputs: dict[int, "_Output"] = {}  # by descriptor


class _Output(io.FileIO):
    """Writes to a descriptor until nobody can read it any more, and then to nowhere; what else is refused is lost."""

    gone = lost = False  # nobody can read it any more; something was refused, as by a full disk

    def write(self, content: Any, /) -> int:
        try:
            left = memoryview(content).cast("B")
            while left:  # a pipe that does not block takes a part, or nothing while it is full
                if (written := super().write(left)) is None:
                    select.select([], [self.fileno()], [])
                left = left[written or 0 :]
            return len(content)
        except OSError as error:
            is_terminal_gone = error.errno == errno.EIO and stat.S_ISCHR(os.fstat(self.fileno()).st_mode)
            if error.errno not in _GONE and not is_terminal_gone:
                is_first, self.lost = not self.lost, True
                if is_first and self.fileno() == 1:
                    reason = as_sentence(error) if error.errno != errno.EBADF else "It is not open for writing."
                    warn(f"What is printed to standard output is lost: {reason}")
                return len(content)
        self.gone = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.fileno())
        os.close(nowhere)
        return len(content)


class _Text(io.TextIOWrapper):
    """Writes text with the characters escaped that would steer a terminal: names and messages are from files."""

    write_exactly = io.TextIOWrapper.write

    def write(self, text: str, /) -> int:
        # Progress bars of libraries return to the start of their line.
        start = "\r" if text.startswith("\r") and self.isatty() else ""
        return super().write(start + visible(text[len(start) :]))


class Unescaped:
    """A standard stream for those who write colours, or text that must stay as it is."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.write = stream, getattr(stream, "write_exactly", stream.write)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def prepare_streams() -> None:
    """Make the standard streams of this process safe, whatever they are connected to.

    A stream that was closed is /dev/null from now on, or the next file that is opened would take its place. What a
    closed pipe, a terminal that is gone or a full disk cannot take is dropped, what an encoding lacks or what would
    steer a terminal (`visible`) is escaped, and input that is not in its encoding becomes lone surrogates. What asyncio
    says beside the error by which it lacks a descriptor is left out. Ctrl-C is never swallowed.
    """
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    sys.unraisablehook, sys.excepthook = _print_unraisable, _print_uncaught
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free descriptor
    for number, name in ((1, "stdout"), (2, "stderr")):
        stream = getattr(sys, name) or open(number, "w", 1, "utf-8", closefd=False)  # noqa: SIM115
        if isinstance(stream, io.TextIOWrapper) and stream.fileno() == number:
            raw, at_once = _outputs.setdefault(number, _Output(number, "w", closefd=False)), stream.write_through
            target = raw if at_once else io.BufferedWriter(raw)
            safe = _Text(target, stream.encoding, "backslashreplace", None, stream.line_buffering, at_once)
            setattr(sys, name, safe)
            setattr(sys, f"__{name}__", safe)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 (as long as the process)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")


def prepare_process() -> None:
    """Prepare output, signals and memory of a training process before its imports, which could swallow Ctrl-C."""
    prepare_streams()
    record = record_from_environment()  # a supervisor sees that a trainer has started, also if an import fails
    use_huge_pages()
    faulthandler.register(signal.SIGUSR1)  # prints the stacks of all threads, even of a process that hangs
    atexit.register(ignore_signals)  # exit handlers run in reverse order, so this one runs last

    def stop(number: int) -> None:
        sentence, status = f"Stopped by {NAMES[number]}.", ExitCode(128 + number)
        record.end(status, sentence, is_origin=True)
        say_and_exit(sentence, status)

    Listener(stop).__enter__()


def _print_unraisable(unraisable: Any) -> None:
    """Print what Python cannot raise, unless it is about an event loop that was never complete.

    In a callback from C++, as jax has for each garbage collection, Python drops what is raised, also for Ctrl-C.
    """
    if unraisable.exc_type is KeyboardInterrupt:
        Interrupts.repeat()
    elif getattr(unraisable.object, "__qualname__", "") != "BaseEventLoop.__del__":
        sys.__unraisablehook__(unraisable)


def _print_uncaught(kind: type[BaseException], *error: Any) -> None:
    """Print an error; Ctrl-C ends the process: extension modules print it when imported, and raise another error."""
    if kind is KeyboardInterrupt:
        say_and_exit("Stopped by Ctrl-C.", ExitCode.INTERRUPTED)
    sys.__excepthook__(kind, *error)


def is_output_read() -> bool:
    """Return whether somebody may still read what this process prints, as far as it knows."""
    return 1 not in _outputs or not _outputs[1].gone


def output_status() -> ExitCode:
    """Return the status of a command whose result is what it prints: `STOPPED` if some of it is lost."""
    flush_output()
    return ExitCode.STOPPED if 1 in _outputs and _outputs[1].lost else ExitCode.OK


def run_command(run: Callable[[], int | None]) -> int:
    """Call `run`, print what ends it in one sentence, and return its exit status, or `STOPPED` if output is lost."""
    try:
        with Interrupts():
            return run() or output_status()
    except BaseException as error:
        if isinstance(error.__cause__, KeyboardInterrupt):  # as imports of extension modules raise it
            error = error.__cause__
        if not is_expected(error):
            raise
        sentence, status = exit_message(error)
        warn(sentence)
        return status


def undecoded(text: str) -> int:
    """Return which byte of what was read is not in the encoding of standard input; 0 if all are."""
    wrong = re.search("[\ud800-\udfff]", text)
    return len(text[: wrong.start()].encode(sys.stdin.encoding)) + 1 if wrong else 0
