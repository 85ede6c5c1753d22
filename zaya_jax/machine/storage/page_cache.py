"""The page cache of the operating system: drop files from it, and ask how much of a file it holds."""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np

_libc = ctypes.CDLL(None, use_errno=True)


def drop_cached(path: Path) -> None:
    """Drop a file, or the files of a folder, from the page cache; dirty pages stay."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_fraction(path: Path) -> float:
    """Return the fraction of a file's pages that are in the page cache (mincore(2)).

    Raises:
      OSError: mincore failed.
    """
    mapped = np.memmap(path, np.uint8, "r")
    pages = np.zeros(-(-mapped.nbytes // mmap.PAGESIZE), np.uint8)
    arguments = (
        ctypes.c_void_p(mapped.ctypes.data),
        ctypes.c_size_t(mapped.nbytes),
        ctypes.c_void_p(pages.ctypes.data),
    )
    if _libc.mincore(*arguments):
        raise OSError(ctypes.get_errno(), f"mincore of {path} failed")
    return float((pages & 1).mean())
