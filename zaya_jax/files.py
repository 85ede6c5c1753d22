"""Files that several processes share: written whole or not at all, locked by the one that works on them."""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from zaya_jax.errors import InputError


def partial_name(path: Path) -> Path:
    """A name for what will become `path`, which no other process and no other thread uses."""
    return path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}.partial")


def write_atomically(path: Path, text: str) -> None:
    """Write `text` so that a reader sees the old file or the new one, whole."""
    part = partial_name(path)
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, what: str = "The folder", *, wait: bool = True) -> Iterator[None]:
    """Hold the file's lock, which the system lets go of when the process ends, however it ends.

    Args:
      path: a file, made where there is none, as is its folder.
      what: the folder is, for messages, such as 'The folder data.cache_dir'.
      wait: for another process that holds it; otherwise that is an error.

    Raises:
      InputError: the folder cannot be written, or another process holds the lock.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = _locked_file(path, wait)
    except BlockingIOError as error:
        raise InputError(f"{what} ({path.parent}) is in use: another process is at work there; wait for it.") from error
    except OSError as error:  # also of file systems that know no locks
        raise InputError(f"{what} ({path.parent}) cannot be written: {error.strerror}.") from error
    with file:
        yield


def _locked_file(path: Path, wait: bool) -> IO[str]:
    """The open file at `path`, locked, which is still the one at `path`: its last owner may have removed it."""
    while True:
        file = path.open("a")
        try:
            fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def sync_folder(folder: Path) -> None:
    """Make what was renamed or written into `folder` survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
