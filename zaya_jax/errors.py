"""Errors that end a command with one sentence, and the exit codes of commands."""

import difflib
import enum
import errno
import os
import re
import traceback
from collections.abc import Iterable


class ExitCode(enum.IntEnum):
    """The exit status of every command of this package."""

    OK = 0
    STOPPED = 1  # the run had to stop, or a check found damage or a difference
    BAD_INPUT = 2
    SUPERSEDED = 3  # other processes have resumed the run
    HUNG_UP = 129  # 128 + SIGHUP: the terminal is gone
    INTERRUPTED = 130  # Ctrl-C; the shell convention is 128 + SIGINT
    TERMINATED = 143  # 128 + SIGTERM


REQUESTED = {ExitCode.HUNG_UP, ExitCode.INTERRUPTED, ExitCode.TERMINATED}  # a person or the system asked for the end


class Reason(enum.IntEnum):
    """The cause of a process' end that its exit status does not tell; a supervisor acts on it, never on a sentence."""

    OTHER = 0
    PEERS_MISSING = 1  # other processes of the job did not come, or an old process still holds the run
    NO_CHECKPOINT = 2  # every checkpoint is damaged
    NOT_FINITE = 3  # too many steps in a row were skipped since they were not finite
    SPIKE = 4  # too many steps in a row were skipped as spikes
    DISK = 5  # a disk is full or fails
    SAVE_FAILED = 6  # saves have failed for too long
    HOST_MEMORY = 7
    DEVICE_MEMORY = 8


class _Stop(Exception):
    """An error with the reason for the exit record: its own, or that of its class."""

    reason = Reason.OTHER

    def __init__(self, message: str, reason: Reason | None = None) -> None:
        super().__init__(message)
        if reason is not None:
            self.reason = reason


class InputError(_Stop, ValueError):
    """Invalid input: a configuration key, an option, a file or a folder.

    The message names the input and its value, and says what is allowed. Commands print it and exit before anything is
    compiled or overwritten.
    """

    status = ExitCode.BAD_INPUT  # a supervisor does not restart what ends with it


class PeersMissing(InputError):
    """Other processes of the job did not connect, or were lost before all had."""

    reason = Reason.PEERS_MISSING


class RunStopped(_Stop, RuntimeError):
    """The run cannot continue. The message says what happened and what to do."""


class Superseded(RunStopped):
    """Other processes have resumed the run, so this one must not write to it any more."""


class WorkerLost(RunStopped):
    """A data worker process was killed. The run can still save a checkpoint."""


class Preempted(RuntimeError):
    """The run was asked to stop (Ctrl-C, SIGTERM, SIGHUP) and has saved a checkpoint."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status  # exit status of the process


def exit_message(error: BaseException) -> tuple[str, int]:
    """Return the last sentence and the exit status of a command that ends with `error`."""
    if isinstance(error, KeyboardInterrupt):
        return f"Stopped by Ctrl-C. {error}".strip(), ExitCode.INTERRUPTED
    if isinstance(error, Preempted):
        return str(error), error.status
    if isinstance(error, Superseded):
        return f"Stopped: {error}", ExitCode.SUPERSEDED
    if isinstance(error, _WRONG_PATH):
        return f"Error: {as_sentence(error)}", ExitCode.BAD_INPUT
    if isinstance(error, InputError):
        return f"{'Error' if error.status == ExitCode.BAD_INPUT else 'Stopped'}: {error}", error.status
    if isinstance(error, OSError | MemoryError):
        advice = " Free some space, then rerun the command." if getattr(error, "errno", None) in _DISK_FULL else ""
        return f"Stopped: {as_sentence(error)}{advice}", ExitCode.STOPPED
    if not isinstance(error, RunStopped) and (sentence := _wrong_setting(error)):
        return f"Error: {sentence}", ExitCode.BAD_INPUT
    return f"Stopped: {error if isinstance(error, RunStopped) else as_sentence(error)}", ExitCode.STOPPED


def exit_reason(error: BaseException) -> Reason:
    """Return the reason for the exit record of a command that ends with `error`, by its type alone."""
    if isinstance(error, _Stop) and error.reason is not Reason.OTHER:
        return error.reason
    if isinstance(error, _Stop) and error.__cause__:
        return exit_reason(error.__cause__)
    if (code := _code(error)) == errno.ENOMEM:
        return Reason.HOST_MEMORY
    return Reason.DISK if code in _DISK_FAULTS else Reason.OTHER


def _code(error: BaseException) -> int | None:
    return errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)


_WRONG_PATH = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError, PermissionError)
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# What NFS, FUSE and Lustre return while a file server is away.
_SERVER_AWAY = (errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.ESHUTDOWN, errno.EHOSTDOWN, errno.EREMOTEIO)
_DISK_FAULTS = (*_DISK_FULL, errno.EIO, errno.EROFS, *_SERVER_AWAY)
_LIMITS = {  # the error of a limit → what to change
    errno.EMFILE: "Raise the limit of this process (ulimit -n).",
    errno.ENFILE: "Raise the limit of this machine (sysctl fs.file-max).",
    errno.EFBIG: "Raise the limit of file sizes (ulimit -f).",
    errno.ENOMEM: "No memory is left, or a limit (ulimit -v, a cgroup) is reached. Raise it, or lower data.workers.",
    errno.EAGAIN: "Raise the limit of processes and threads (ulimit -u, pids.max of a cgroup).",
}
# How libraries, which raise other errors than `OSError`, say so.
_TEXTS = {os.strerror(code): code for code in _LIMITS} | {"can't start new thread": errno.EAGAIN}
_TEXTS |= dict.fromkeys(("failed to map segment", "error while initializing the extension"), errno.ENOMEM)


def _reached_limit(error: BaseException) -> int | None:
    """Return which limit of `_LIMITS` an error is due to, itself or by what it was raised from; None if none."""
    code, named = _code(error), next((code for text, code in _TEXTS.items() if text in str(error)), None)
    return (code if code in _LIMITS else named) or (_reached_limit(error.__cause__) if error.__cause__ else None)


def is_expected(error: BaseException) -> bool:
    """Return whether `exit_message` says what a person needs to know, so that no traceback is wanted."""
    kinds = (InputError, RunStopped, Preempted, KeyboardInterrupt, OSError, MemoryError)
    return isinstance(error, kinds) or _reached_limit(error) is not None or _wrong_setting(error) is not None


def _wrong_setting(error: BaseException) -> str | None:
    """Return the sentence for an error of jax that an environment variable causes; None if none does."""
    frames = traceback.extract_tb(error.__traceback__)
    if not isinstance(error, AssertionError | RuntimeError | TypeError | ValueError) or not frames:
        return None
    if frames[-1].filename.endswith("jax/_src/xla_bridge.py"):
        problem = as_sentence(error) if str(error) else "Its plugin is not installed, or finds no device."
        platforms = f"JAX_PLATFORMS is {os.environ.get('JAX_PLATFORMS', '')!r}, but jax cannot use it"
        remedy = "Install zaya_jax with the extra cuda or rocm, or unset JAX_PLATFORMS to use what is there."
        return f"{platforms}. {problem} {remedy}"
    for name, value in os.environ.items():
        words = "[_ ]".join(name.split("_")[1:])  # jax writes jax_disable_jit, or Disable jit
        pattern = "Disallowed .* transfer" if name == "JAX_TRANSFER_GUARD" else words
        if re.fullmatch("JAX_[A-Z0-9]+_[A-Z0-9_]+", name) and re.search(pattern, str(error), re.IGNORECASE):
            return f"{name} is {value!r}, with which zaya_jax does not run; unset it. {as_sentence(error)}"
    return None


def printable(text: str, longest: int = 10_000) -> str:
    """Return untrusted text as one line of at most `longest` characters, with what a terminal cannot show escaped."""
    cut = text[:longest]
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in cut)[:longest]


# Controls of terminals but tab and line feed, and what changes the direction or the lines of text.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Return text in which what steers a terminal is escaped, and all else is kept."""
    return _CONTROLS.sub(lambda control: ascii(control[0])[1:-1], text)


_CUTOFF = 0.68  # similarity of difflib: above it 'tiny.yaml' is like 'configs/tiny.yaml', but 'tpu' not like 'cpu'


def did_you_mean(name: str, known: Iterable[str], prefix: str = "", suffix: str = "") -> str:
    """Return ' Did you mean PREFIX X SUFFIX?' for the known name that is most like a misspelled one; '' if none is."""
    matches = difflib.get_close_matches(name[:200], list(known), n=1, cutoff=_CUTOFF)
    return f" Did you mean {prefix}{matches[0]}{suffix}?" if matches else ""


def as_sentence(error: BaseException) -> str:
    """Return the message of an error as a line that ends with a full stop, and what to change if a limit is reached."""
    # tensorstore adds the specification of the array.
    text = re.split(r" \[(?:tensorstore_spec|os_error_code|source locations)=", " ".join(str(error).split()))[0]
    text = text if len(text) <= 300 else f"{text[:100]} … {text[-200:]}"  # the cause comes last
    limit = _reached_limit(error)
    if isinstance(error, OSError) and error.strerror:
        text = f"{f'{error.filename}: ' if error.filename else ''}{error.strerror}"
    elif limit and not 0 < len(text) <= 100:  # a library's account of all its layers
        text = os.strerror(limit)
    sentence = f"{(text or type(error).__name__).removesuffix('.')}."
    return f"{sentence} {_LIMITS[limit]}" if limit else sentence
