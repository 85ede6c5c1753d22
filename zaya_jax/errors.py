"""The errors that end a command with a full sentence, and the exit codes of commands."""

import enum
import errno


class ExitCode(enum.IntEnum):
    """The exit status of every command of this package."""

    OK = 0
    STOPPED = 1  # a run had to stop, or something is damaged or differs
    BAD_INPUT = 2
    INTERRUPTED = 130  # Ctrl-C, as shells have it: 128 + SIGINT
    TERMINATED = 143  # 128 + SIGTERM


class InputError(ValueError):
    """Something given to the program is wrong: a key, a file, a folder or a value.

    The message is a full sentence that names what is wrong and says what is allowed. Commands print it
    and exit with `ExitCode.BAD_INPUT`; nothing has been compiled or overwritten by then.
    """


class RunStopped(RuntimeError):
    """A run that cannot continue: what happened and what can be done, in a full sentence."""


class WorkerLost(RunStopped):
    """A process that reads data was killed; the run can save what it has done."""


class Preempted(RuntimeError):
    """A run that was asked to end (Ctrl-C, SIGTERM) and has saved where it is; `status` is that of the process."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def last_words(error: BaseException) -> tuple[str, int]:
    """What a command says that ends with `error`, and its exit status."""
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
    """Whether a file could not be written for want of space, or of the user's quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def as_sentence(error: BaseException) -> str:
    """What an error says, on one line that ends with a full stop."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename or 'A file'}: {error.strerror}."
    text = " ".join(str(error).split())[:300] or type(error).__name__
    return text if text.endswith(".") else f"{text}."
