"""Errors that end a command with one sentence, and the exit codes of commands."""

import difflib
import enum
import errno
from collections.abc import Iterable


class ExitCode(enum.IntEnum):
    """The exit status of every command of this package."""

    OK = 0
    STOPPED = 1  # the run had to stop, or a check found damage or a difference
    BAD_INPUT = 2
    INTERRUPTED = 130  # Ctrl-C; the shell convention is 128 + SIGINT
    TERMINATED = 143  # 128 + SIGTERM


class InputError(ValueError):
    """Invalid input: a configuration key, an option, a file or a folder.

    The message names the input and its value, and says what is allowed. Commands print it and exit with
    `ExitCode.BAD_INPUT`, before anything is compiled or overwritten.
    """


class RunStopped(RuntimeError):
    """The run cannot continue. The message says what happened and what to do."""


class WorkerLost(RunStopped):
    """A data worker process was killed. The run can still save a checkpoint."""


class Preempted(RuntimeError):
    """The run was asked to stop (Ctrl-C, SIGTERM) and has saved a checkpoint.

    Attributes:
      status: the exit status of the process.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def last_words(error: BaseException) -> tuple[str, int]:
    """Return the last sentence and the exit status of a command that ends with `error`."""
    if isinstance(error, KeyboardInterrupt):
        return "Stopped by Ctrl-C.", ExitCode.INTERRUPTED
    if isinstance(error, Preempted):
        return str(error), error.status
    if is_disk_full(error):
        return f"Stopped: {error}. Free some space, then rerun the command.", ExitCode.STOPPED
    if isinstance(error, InputError):
        return f"Error: {error}", ExitCode.BAD_INPUT
    return f"Stopped: {error}", ExitCode.STOPPED


def is_disk_full(error: BaseException) -> bool:
    """Return whether a write failed because the disk or the user's quota is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


_CUTOFF = 0.68  # similarity of difflib: above it 'tiny.yaml' is like 'configs/tiny.yaml', but 'tpu' not like 'cpu'


def did_you_mean(name: str, known: Iterable[str], prefix: str = "", suffix: str = "") -> str:
    """Return ' Did you mean X?' for the known name that is most like a misspelled one; '' if none is.

    Args:
      name: the misspelled name.
      known: all names that exist.
      prefix: text before the suggested name.
      suffix: text after it.
    """
    matches = difflib.get_close_matches(name[:200], list(known), n=1, cutoff=_CUTOFF)
    return f" Did you mean {prefix}{matches[0]}{suffix}?" if matches else ""


def as_sentence(error: BaseException) -> str:
    """Return the message of an error as one line that ends with a full stop."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'A file'}: {error.strerror}."
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return text if text.endswith(".") else f"{text}."
