"""The secret of a job, with which its processes prove to each other that they belong to it.

It is the environment variable `ZAYA_JOB_SECRET`. Without that, process 0 makes one and hands it to the others in a file
that only the same user can read, until all have connected.
"""

import contextlib
import hmac
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from zaya_jax.errors import InputError
from zaya_jax.hardware.environment import cache_folder
from zaya_jax.run.digests import digest
from zaya_jax.run.files import write_atomically

VARIABLE = "ZAYA_JOB_SECRET"
_SHORTEST, _LONGEST = 16, 4096  # characters
_ADVICE = f"Set the same {VARIABLE} in the environment of all processes."


def make_secret() -> str:
    """Return a new secret."""
    return secrets.token_hex(32)


def prove(secret: str, *parts: str) -> str:
    """Return the HMAC-SHA256 of `parts`, which contain no newline, in hexadecimal digits."""
    content = "\n".join(parts).encode(errors="surrogateescape")
    return hmac.new(secret.encode(errors="surrogateescape"), content, "sha256").hexdigest()


def is_proof(text: str, secret: str, *parts: str) -> bool:
    """Return whether `text` is what `prove` returns."""
    return hmac.compare_digest(text.encode(errors="surrogateescape"), prove(secret, *parts).encode())


def secret_from_environment() -> str | None:
    """Return the value of `ZAYA_JOB_SECRET`; None if it is not set. `InputError` if it is too short."""
    secret = os.environ.get(VARIABLE)
    if secret and not _SHORTEST <= len(secret) <= _LONGEST:
        raise InputError(f"{VARIABLE} has {len(secret)} characters, but must have {_SHORTEST} to {_LONGEST:,}, such as "
                         "those that `openssl rand -hex 32` prints.")  # fmt: skip
    return secret or None


def secret_path(folder: Path | None, address: str) -> Path:
    """Return the file for the secret: in the job's `folder`, or without one in the user's cache, by `address`.

    Raises:
      InputError: there is no folder, and no cache because no home folder is known.
    """
    if folder is not None:
        return folder / "job_secret"
    if (cache := cache_folder()) is None:
        raise InputError(f"The job secret has no place, since neither HOME nor XDG_CACHE_HOME is set. {_ADVICE}")
    return cache / "jobs" / digest(address.encode(errors="surrogateescape"))


def read_secret(path: Path) -> str | None:
    """Return this process's secret: of the environment, or from the file at `path`; None if there is neither.

    Raises:
      InputError: the file is a link, belongs to another user, can be read by others, or cannot be read.
    """
    if secret := secret_from_environment():
        return secret
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InputError(f"The job secret {path} cannot be read: {error.strerror}. {_ADVICE}") from error
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise InputError(f"The job secret {path} must be a file that belongs to you and that nobody else can read. "
                             f"Remove it, or set {VARIABLE} in the environment of all processes.")  # fmt: skip
        return os.read(file, _LONGEST).decode(errors="surrogateescape")
    finally:
        os.close(file)


@contextlib.contextmanager
def share_secret(path: Path) -> Iterator[str]:
    """Yield the secret of the environment, or a new one, which is in the file at `path` meanwhile.

    Raises:
      InputError: the file cannot be written, or the file system does not keep it from other users.
    """
    if secret := secret_from_environment():
        yield secret
        return
    secret, is_new = make_secret(), not path.parent.exists()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(path, secret, mode=0o600)
    except OSError as error:
        raise InputError(f"The job secret {path} cannot be written: {error.strerror}. {_ADVICE}") from error
    try:
        if read_secret(path) != secret:
            raise InputError(f"Another process 0 replaced the job secret {path}. Start each job once.")
        yield secret
    finally:
        with contextlib.suppress(OSError, InputError):
            if read_secret(path) == secret:
                path.unlink()
            if is_new:  # a job that did not start leaves no folder
                path.parent.rmdir()
