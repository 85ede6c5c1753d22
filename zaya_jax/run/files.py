"""Files that several processes share: written whole or not at all, locked by the one that works on them."""

import contextlib
import fcntl
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from zaya_jax.errors import InputError

_LONGEST_JSON = 2**26  # bytes; the index of the legacy 74B's weights needs a fiftieth


def partial_name(path: Path) -> Path:
    """A name for what will become `path`, which no other process and no other thread uses."""
    return path.with_name(f"{path.name}.{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}.partial")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write text or bytes so that a reader sees the old file or the new one, whole."""
    part = partial_name(path)
    try:
        with part.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def require_regular(path: Path) -> None:
    """Raise `InputError` for a folder, a device or a pipe: reading a pipe waits for a writer, and works only once."""
    if path.exists() and not path.is_file():
        raise InputError(f"{path} cannot be read: it is a folder, a pipe or a device, not a regular file.")


def read_json(path: Path) -> Any:
    """Parse a JSON file that may be damaged or hostile, in bounded time and memory.

    Raises:
      InputError: it cannot be read, is longer than 64 MiB, or is not JSON.
    """
    try:
        require_regular(path)
        with path.open("rb") as file:
            raw = file.read(_LONGEST_JSON + 1)
        if len(raw) > _LONGEST_JSON:
            raise InputError(f"{path} is longer than {_LONGEST_JSON} bytes, the most that is read of such a file.")
        return json.loads(raw.decode("utf-8"))
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not JSON: {str(error)[:200]}.") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; `InputError` where it holds none, see `read_json`."""
    tree = read_json(path)
    if not isinstance(tree, dict):
        raise InputError(f"{path} holds no JSON object.")
    return tree


@contextlib.contextmanager
def locked(path: Path, what: str = "The folder", *, wait: bool = True) -> Iterator[None]:
    """Hold the file's lock, which the system lets go of when the process ends, however it ends.

    Args:
      path: a file, made where there is none, as is its folder.
      what: the folder is, for messages, such as 'The folder data.cache_dir'.
      wait: for another process that holds it; otherwise that is an error.

    Raises:
      InputError: the folder cannot be written, or another process holds the lock.
    """
    if path.parent.is_file():
        raise InputError(f"{what} ({path.parent}) is a file, but must be a folder.")
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
            _lock(file, wait)
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def _lock(file: IO[str], wait: bool) -> None:
    for pause in () if wait else (0.01, 0.05, 0.2):  # `is_locked` of another process holds it for a moment
        with contextlib.suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(pause)
    fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def sync_folder(folder: Path) -> None:
    """Make what was renamed or written into `folder` survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
