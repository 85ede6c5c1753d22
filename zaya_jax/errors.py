"""The errors that end a command with a full sentence, and its exit status."""

import errno


class InputError(ValueError):
    """Something given to the program is wrong: a key, a file, a folder or a value.

    The message is a full sentence that names what is wrong and says what is allowed. Commands print it
    and exit with status 2; nothing has been compiled or overwritten by then.
    """


class RunStopped(RuntimeError):
    """A run that cannot go on: what happened and what can be done, in a full sentence."""


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
        return "Stopped by Ctrl-C.", 130
    if isinstance(error, Preempted):
        return str(error), error.status
    if is_disk_full(error):
        return f"Stopped: {error}. Free some space, then rerun the command.", 1
    return (f"Error: {error}", 2) if isinstance(error, InputError) else (f"Stopped: {error}", 1)


def is_disk_full(error: BaseException) -> bool:
    """Whether a file could not be written for want of space, or of the user's quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
