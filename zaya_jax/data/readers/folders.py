"""List a folder as all readers do: sorted, without hidden items, and without links to folders."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from zaya_jax.errors import InputError, printable


def list_folder(folder: Path, unread: Counter[str]) -> Iterator[os.DirEntry[str]]:
    """Yield the files and folders in a folder, sorted by name, and count in `unread` the items that are left out.

    Raises:
      InputError: the folder cannot be listed.
    """
    try:
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
    except OSError as error:
        raise InputError(f"The folder {folder} cannot be listed: {error.strerror}.") from error
    for entry in entries:
        if entry.name.startswith("."):
            unread["hidden"] += 1
        elif entry.is_symlink() and os.path.isdir(entry.path):
            unread["linked (folders)"] += 1
        else:
            yield entry


def suffix_kind(name: str) -> str:
    """Return what counts of unread files call a file; numbers and long suffixes, which can be many, count as none."""
    suffix = Path(name).suffix
    return "without suffix" if len(suffix) > 12 or not suffix.strip(".0123456789") else printable(suffix)
