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
from zaya_jax.run.digests import digest
from zaya_jax.run.files import expanded, explained, write_atomically
from zaya_jax.run.writing import make_folder, remove

VARIABLE = "ZAYA_JOB_SECRET"
SECRET_BYTES = 32  # of a new secret


def prove(secret: str, *parts: str) -> str:
    """Return the HMAC-SHA256 of `parts` in hexadecimal digits."""
    return hmac.new(os.fsencode(secret), "\n".join(parts).encode(), "sha256").hexdigest()


def is_proof(text: str, secret: str, *parts: str) -> bool:
    """Return whether `text` is what `prove` returns."""
    return hmac.compare_digest(text.encode(), prove(secret, *parts).encode())


def secret_path(folder: Path | None, address: str) -> Path:
    """Return the file for the secret: in the `folder` that a job shares, or for its `address` in the user's cache."""
    if folder is not None:
        return folder / f"job_secret-{digest(os.fsencode(address))[:8]}"  # another start may have another address
    cache = expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    return cache / "zaya_jax" / "jobs" / digest(os.fsencode(address))


def read_secret(path: Path) -> str | None:
    """Return the secret: that of the environment, or in the file at `path`; None if there is neither.

    `InputError` if others than this user could have written the file, or can read it; `OSError` if it is a link.
    """
    if secret := os.environ.get(VARIABLE):
        return secret
    try:
        # No link, and without waiting for a pipe.
        flags = os.O_NOFOLLOW | os.O_NONBLOCK
        with open(path, errors="surrogateescape", opener=lambda name, mode: os.open(name, mode | flags)) as file:
            status = os.fstat(file.fileno())
            if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077:
                return file.read()
    except FileNotFoundError:
        return None
    must = "must be a file that belongs to you and that nobody else can read"
    raise InputError(f"The job secret {path} {must}. Remove it, or set {VARIABLE} for all processes.")


@contextlib.contextmanager
def share_secret(path: Path) -> Iterator[str]:
    """Yield the secret of the environment, or a new one, which is in the file at `path` meanwhile.

    `InputError` if the file cannot be written, or the file system does not keep it from other users.
    """
    if secret := os.environ.get(VARIABLE):
        yield secret
        return
    secret, missing = secrets.token_hex(SECRET_BYTES), [folder for folder in path.parents if not os.path.exists(folder)]
    advice = f" Set {VARIABLE} to the same text for all processes instead."
    with explained(f"The job secret {path} cannot be written", advice):
        make_folder(path.parent)
        write_atomically(path, secret, mode=0o600)
    try:
        yield read_secret(path) or secret
    finally:
        with contextlib.suppress(OSError, InputError):
            if read_secret(path) == secret:  # not that of a later start
                remove(path)
            for folder in missing:  # a job that did not start leaves no folder
                folder.rmdir()
