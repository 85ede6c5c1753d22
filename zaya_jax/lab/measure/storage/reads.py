"""Random and sequential reads of one file, from the storage (cold) and from the page cache (warm)."""

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax.data.io_estimate import PAGE_BYTES
from zaya_jax.lab.measure.timing import time_calls
from zaya_jax.lab.result import rounded

BLOCK = 2**22  # bytes of a sequential read
_libc = ctypes.CDLL(None, use_errno=True)


def write_file(path: Path, size: int) -> None:
    """Write `size` random bytes, rounded down to whole pages, and wait until they are durable."""
    random, whole = np.random.default_rng(0), size // PAGE_BYTES * PAGE_BYTES
    with path.open("wb") as file:
        for start in range(0, whole, BLOCK):
            file.write(random.bytes(min(BLOCK, whole - start)))
        file.flush()
        os.fsync(file.fileno())


def time_reads(path: Path, pattern: str, cache: str, threads: int, operations: int, repeats: int) -> dict[str, Any]:
    """Time passes of reads.

    Args:
      path: file of whole pages.
      pattern: 'random', single pages in random order, or 'sequential', in order and `BLOCK` bytes at a time.
      cache: 'cold' drops the file from the page cache before each pass; 'warm' reads it once before the first.
      threads: number of threads that share the reads of a random pass; a sequential one has a single thread.
      operations: maximum number of pages of a random pass.
      repeats: number of passes.

    Returns:
      For JSON: `pattern`, `cache` and the `threads` that read; `operations` and `bytes` of a pass, and both per second
      in the median pass; `seconds` of each; `cached`, the fraction of the file in the page cache at the start of a
      pass: the maximum over cold passes, the minimum over warm ones.
    """
    size, cached = path.stat().st_size, list[float]()
    if pattern == "random":
        order = np.random.default_rng(0).permutation(size // PAGE_BYTES)[:operations].astype(np.int64) * PAGE_BYTES
        parts, length, advice = np.array_split(order, threads), PAGE_BYTES, os.POSIX_FADV_RANDOM
    else:
        parts, length, advice = [np.arange(0, size, BLOCK)], BLOCK, os.POSIX_FADV_SEQUENTIAL

    def before() -> None:
        if cache == "cold":
            drop_cached(path)
        cached.append(cached_fraction(path))

    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(len(parts)) as pool:
        os.posix_fadvise(file.fileno(), 0, 0, advice)  # without it, a page's neighbours would be read, too

        def read(offsets: np.ndarray) -> None:
            buffer = bytearray(length)
            for offset in offsets.tolist():
                if not os.preadv(file.fileno(), [buffer], offset):
                    raise RuntimeError(f"No bytes at offset {offset} of the file.")

        if cache == "warm":
            while file.read(BLOCK):
                pass
        median, seconds = time_calls(lambda: list(pool.map(read, parts)), repeats, 0, before)
    count = sum(map(len, parts))
    moved, worst = min(count * length, size), max if cache == "cold" else min
    row = {"pattern": pattern, "cache": cache, "threads": len(parts), "operations": count, "bytes": moved}
    row |= {"cached": worst(cached), "seconds": rounded(seconds)}
    return row | {"operations_per_second": count / median, "bytes_per_second": moved / median}


def drop_cached(path: Path) -> None:
    """Drop a file, or the files of a folder, from the page cache; dirty pages stay."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_fraction(path: Path) -> float:
    """Return the fraction of a file's pages that are in the page cache (mincore(2)); OSError if it fails."""
    mapped = np.memmap(path, np.uint8, "r")
    pages = np.zeros(-(-mapped.nbytes // mmap.PAGESIZE), np.uint8)
    start, vector = (ctypes.c_void_p(array.ctypes.data) for array in (mapped, pages))
    if _libc.mincore(start, ctypes.c_size_t(mapped.nbytes), vector):
        raise OSError(ctypes.get_errno(), f"mincore of {path} failed")
    return float((pages & 1).mean())
