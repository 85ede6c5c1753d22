"""Verification of prepared files by their digests, once for each state of a file."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zaya_jax.data.manifest import FileEntry, Manifest, describe_file, json_digest
from zaya_jax.errors import InputError
from zaya_jax.run.files import locked, write_atomically

_BATCH_FILES = 64  # files


def verify_files(folder: Path, manifest: Manifest, cache: Path, remedy: str) -> None:
    """Compare the digest of every file of a prepared folder.

    Reading terabytes at each start would cost hours, so `cache` notes which files were verified, with their size and
    time of change, and they are read again only when these differ. A change without a new time is reported when its
    record is read (see `Documents`).

    Raises:
      InputError: a file was altered; `remedy` is the sentence that says what to do about it.
    """
    notes = cache / f"verified-{json_digest(str(folder.resolve()))}.json"
    if not _unverified(folder, manifest, notes):
        return
    with locked(notes.with_suffix(".lock"), "The folder data.cache_dir"):  # of several processes one reads the files
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
        notes = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return notes if isinstance(notes, dict) else {}
