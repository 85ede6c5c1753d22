"""Verify the digests of prepared files, again only after a file changes."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zaya_jax.data.manifest import FileEntry, Manifest, describe_file, json_digest
from zaya_jax.errors import InputError
from zaya_jax.run.files import locked, read_file, write_atomically

_BATCH_FILES = 64  # files


def verify_files(folder: Path, manifest: Manifest, cache: Path, remedy: str) -> None:
    """Verify the digest of every file of a prepared folder.

    Reading terabytes at each start would take hours, so `cache` records the size and modification time of verified
    files, and a file is read again only if these differ. A change that keeps both is detected when the damaged record
    is read (see `Documents`).

    Args:
      folder: the prepared folder.
      manifest: its manifest.
      cache: folder that records the verified files.
      remedy: sentence of the error that says what to do.

    Raises:
      InputError: a file was altered.
    """
    notes = cache / f"verified-{json_digest(str(folder.resolve()))}.json"
    if not _unverified(folder, manifest, notes):
        return
    with locked(notes.with_suffix(".lock"), "The folder data.cache_dir"):  # only one process reads the files
        unverified, verified = _unverified(folder, manifest, notes), _read(notes)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:  # hashing and reading release the GIL
            for start in range(0, len(unverified), _BATCH_FILES):
                batch = unverified[start : start + _BATCH_FILES]
                actual = threads.map(lambda entry: describe_file(folder / entry.file).digest, batch)
                for entry, digest in zip(batch, actual, strict=True):
                    if digest != entry.digest:
                        path = folder / entry.file
                        raise InputError(f"The data file {path} was altered: its checksum does not match. {remedy}")
                    verified[entry.file] = _stamp(folder, entry)
                write_atomically(notes, json.dumps(verified))


def _unverified(folder: Path, manifest: Manifest, notes: Path) -> list[FileEntry]:
    verified = _read(notes)
    return [entry for entry in manifest.files() if verified.get(entry.file) != _stamp(folder, entry)]


def _stamp(folder: Path, entry: FileEntry) -> list[object]:
    stat = (folder / entry.file).stat()
    return [entry.digest, stat.st_size, stat.st_mtime_ns]


def _read(path: Path) -> dict[str, list[object]]:
    try:
        notes = json.loads(read_file(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}
