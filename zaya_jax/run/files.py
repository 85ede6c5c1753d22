"""Atomic writes, locks and bounded JSON reads for files that several processes share."""

import contextlib
import errno
import fcntl
import json
import os
import re
import stat
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from zaya_jax.errors import InputError, Reason, did_you_mean, printable
from zaya_jax.run.writing import make_folder, new_file, open_file

_MOST_TRIES = 1000  # to lock a file that others remove
LONGEST_JSON = 2**26  # bytes; 50 times the weight index of the legacy 74B, and more than 100,000 events


def write_atomically(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Write a file as `new_file` does; lone surrogates, which stand for bytes of paths, become escapes."""
    with new_file(path, mode) as file:
        file.write(content.encode(errors="backslashreplace") if isinstance(content, str) else content)


def expanded(path: str | Path) -> Path:
    """Return a path with a home folder for `~`, where there is one; unlike `Path.expanduser`, this never raises."""
    return Path(os.path.expanduser(path))


def read_text(path: str, option: str) -> str:
    """Return the text of a file that `option` names; InputError if it cannot be read or is not UTF-8."""
    try:
        return expanded(path).read_bytes().decode()
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL, too
        invalid = f"the byte at offset {error.start} is not UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        reason = invalid or getattr(error, "strerror", None) or error
        hint = nearest_path(expanded(path)) if isinstance(error, FileNotFoundError) else ""
        raise InputError(f"{option} {path} cannot be read: {reason}.{hint}") from error


def display_path(path: Path) -> str:
    """Return a path for a message, relative to the working directory if it is inside."""
    return printable(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def require_regular(path: Path) -> None:
    """Raise `InputError` for a folder, a device or a pipe; reading a pipe would block."""
    if os.path.exists(path) and not os.path.isfile(path):  # unlike those of `Path`, these never raise
        raise InputError(f"{path} cannot be read: it is a folder, a pipe or a device, not a regular file.")


def require_existing(path: Path, named: str) -> None:
    """Raise `InputError` if a path cannot be checked or does not exist, and suggest one with a similar name.

    The message starts with `named`, such as 'init_from is runs/tiny, which'.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        inside = "" if path.is_absolute() else f" Relative paths start in {Path.cwd()}."
        raise InputError(f"{named} does not exist.{nearest_path(path) or hub_hint(str(path)) or inside}") from error
    except OSError as error:
        raise InputError(f"{named} cannot be read: {error.strerror}.") from error


_LOCAL = ("checkpoints", "configs", "data", "exported", "models", "runs")  # folders, not owners on the Hub


def hub_hint(name: str, *, is_data: bool = False) -> str:
    """Return how to download a missing path that is named as on the Hugging Face Hub; '' for other paths."""
    owner, _, repository = name.partition("/")
    if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name, re.ASCII) or os.path.lexists(owner) or owner in _LOCAL:
        return ""
    kind, flags, folder = ("data set", "--repo-type dataset ", "data") if is_data else ("model", "", "models")
    command = f"hf download {flags}{name} --local-dir {folder}/{repository}"
    return (
        f" If it is a {kind} of the Hugging Face Hub, pip install huggingface_hub, run {command}, and name that folder."
    )


def nearest_path(path: Path) -> str:
    """Return ' Did you mean X?' for an existing path that differs in one name from a missing one; '' if none does."""
    misspelled = path
    while misspelled.parent != misspelled and not os.path.exists(misspelled.parent):
        misspelled = misspelled.parent
    rest, folder = path.relative_to(misspelled), misspelled.parent
    try:
        names = [entry.name for entry in folder.iterdir() if os.path.exists(entry / rest)]
    except OSError:
        return ""
    prefix = str(folder / misspelled.name).removesuffix(misspelled.name)
    return did_you_mean(misspelled.name, names, prefix, "" if rest == Path() else f"/{rest}")


def read_start(path: str | Path, most: int, skip: int = 0) -> bytes:
    """Return at most `most` bytes of a regular file after the first `skip`, without waiting; raises `OSError`."""
    with open_regular(path) as file:
        return os.pread(file.fileno(), most, skip)


def start_text(path: Path, most: int = 2**16) -> str:
    """Return at most `most` bytes of the start of a regular file, without waiting; empty if it cannot be read."""
    with contextlib.suppress(OSError, ValueError):
        return read_start(path, most).decode(errors="replace")
    return ""


@contextlib.contextmanager
def explained(problem: str, advice: str = "") -> Iterator[None]:
    """Raise an `OSError` of the block as an `InputError`: the `problem`, such as 'X cannot be written', and why."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{problem}: {error.strerror}.{advice}") from error


def read_end(path: Path, most: int) -> bytes:
    """Return the last bytes, at most `most`, of a regular file, without waiting; raises `OSError`."""
    with open_regular(path) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - most))
        return file.read(most)


def read_file(path: Path) -> bytes:
    """Return the content of a regular file, without waiting; raises `OSError`."""
    with open_regular(path) as file:
        return file.read()


def open_regular(path: str | Path) -> IO[bytes]:
    """Open a regular file to read it; `OSError` for anything else, such as a pipe, which would block."""
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a regular file", str(path))
    return file


def read_json(path: Path) -> Any:
    """Parse a JSON file of at most 64 MiB that may be damaged or hostile; `InputError` if that fails."""
    try:
        with open_regular(path) as file:
            raw = file.read(LONGEST_JSON + 1)
        if len(raw) <= LONGEST_JSON:
            return json.loads(raw.decode("utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {str(error)[:200]}.") from error
    raise InputError(f"{path} is larger than the limit of {LONGEST_JSON:,} bytes for a JSON file.")


def json_text(tree: Mapping[str, Any]) -> str:
    """Return the content of a JSON file, as `transformers` formats it."""
    return json.dumps(tree, indent=2, ensure_ascii=False) + "\n"


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; `InputError` if it is anything else, see `read_json`."""
    tree = read_json(path)
    if not isinstance(tree, dict):
        raise InputError(f"{path} is not a JSON object.")
    return tree


class Unlockable(InputError):
    """A file system has no locks."""


@contextlib.contextmanager
def locked(path: Path, what: str = "The folder", *, wait: bool = True) -> Iterator[None]:
    """Hold a file lock, which the operating system releases when the process ends, even after a kill.

    The lock file at `path` and its folder are created if missing. Messages begin with `what`. `InputError` if the
    folder cannot be written, or another process holds the lock and this one does not `wait`; `Unlockable` if the file
    system has no locks.
    """
    subject = f"{what} ({path.parent})"
    if os.path.lexists(path.parent) and not path.parent.is_dir():
        kind = "a file" if path.parent.is_file() else "a pipe, a device or a link without a target"
        raise InputError(f"{subject} is {kind}, but must be a folder.")
    try:
        file = _locked_file(path, wait)
    except BlockingIOError as error:
        busy = f"{subject} is in use by another process; wait until it finishes."
        raise InputError(busy, Reason.PEERS_MISSING) from error
    except OSError as error:
        kind = Unlockable if error.errno in (errno.ENOLCK, errno.ENOSYS) else InputError
        raise kind(f"{subject} cannot be written: {error.strerror}.") from error
    with file:
        yield


def _locked_file(path: Path, wait: bool) -> IO[str]:
    """Open and lock the file at `path`; retry if its last owner removed it or its folder meanwhile."""
    for _ in range(_MOST_TRIES):
        make_folder(path.parent)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            # Whoever can read a file can lock it: only those who can write the folder may.
            mode = 0o660 if path.parent.stat().st_mode & stat.S_IWGRP else 0o600
            file = stack.enter_context(open(open_file(path, os.O_RDWR, mode), "a"))
            with contextlib.suppress(OSError):  # another member's
                os.fchmod(file.fileno(), mode)
            _lock(file, wait)
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                stack.pop_all()  # the caller closes it
                return file
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _lock(file: IO[str], wait: bool) -> None:
    for pause in () if wait else (0.01, 0.05, 0.2):  # another process's `is_locked` holds it for a moment
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(pause)
    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def sync_folder(folder: Path) -> None:
    """Flush renames and new files in `folder` to disk, so that they survive a power failure."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
