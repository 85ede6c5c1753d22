"""Digests of prepared files, compared once for each file as it lies there."""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zaya_jax.data.manifest import FileEntry, Manifest, describe_file, digest_of
from zaya_jax.errors import InputError
from zaya_jax.run.files import locked, write_atomically

_NOTED_TOGETHER = 64  # files


def verify_files(folder: Path, manifest: Manifest, cache: Path, remedy: str) -> None:
    """Compare the digest of every file of a prepared folder.

    Reading terabytes at each start would cost hours, so what was found good is noted in `cache` with the file's
    size and time of change, and is read again only when these differ. What changes without a new time is told
    when its record is read (see `Documents`).

    Args:
      folder: a prepared folder.
      manifest: of it.
      cache: a folder for the notes.
      remedy: the sentence that says what to do about a damaged file.

    Raises:
      InputError: a file was altered.
    """
    notes = cache / f"verified-{digest_of(str(folder.resolve()))}.json"
    if not _unknown(folder, manifest, notes):
        return
    with locked(notes.with_suffix(".lock"), "The folder data.cache_dir"):  # of several processes one reads the files
        unknown, known = _unknown(folder, manifest, notes), _read(notes)
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as threads:  # hashing and reading release the GIL
            for some in _batched(unknown, _NOTED_TOGETHER):
                for entry, found in zip(some, threads.map(lambda e: describe_file(folder / e.file), some), strict=True):
                    if found.digest != entry.digest:
                        path = folder / entry.file
                        raise InputError(f"The data file {path} was altered: its digest does not fit. {remedy}")
                    known[entry.file] = _stamp(folder, entry)
                write_atomically(notes, json.dumps(known))


def _unknown(folder: Path, manifest: Manifest, notes: Path) -> list[FileEntry]:
    known = _read(notes)
    return [entry for entry in manifest.files() if known.get(entry.file) != _stamp(folder, entry)]


def _stamp(folder: Path, entry: FileEntry) -> list[object]:
    stat = (folder / entry.file).stat()
    return [entry.digest, stat.st_size, stat.st_mtime_ns]


def _read(path: Path) -> dict[str, list[object]]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}


def _batched(entries: list[FileEntry], count: int) -> Iterator[list[FileEntry]]:
    for start in range(0, len(entries), count):
        yield entries[start : start + count]
