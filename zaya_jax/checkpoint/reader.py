"""Read and verify the arrays of a checkpoint in host memory, without devices."""

import errno
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

from zaya_jax.checkpoint.digest import array_digest
from zaya_jax.checkpoint.small_arrays import SMALL_ARRAYS, unpack_array
from zaya_jax.run.digests import Digests, read_slice
from zaya_jax.run.manifest import STATE, Damaged, Unreadable, read_digests, read_manifest
from zaya_jax.run.progress import WorkProgress

_THREADS = 4  # each reads one piece of an array at a time
_CACHE = 2**26  # bytes, for the storage index


class CheckpointReader:
    """Reads arrays of the checkpoint in `folder`, finished or not; `leaves` is the manifest's."""

    def __init__(self, folder: Path, leaves: Mapping[str, Mapping[str, Any]]) -> None:
        self.folder = folder
        self._leaves = leaves
        self._small: np.ndarray | None = None
        self._lock = threading.Lock()
        self._store = {"driver": "ocdbt", "base": f"file://{(folder / STATE).resolve()}/"}
        self._open: dict[str, Any] = {}
        # Arrays share one context, or each would read the storage index again.
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE}})

    def read(self, name: str, where: tuple[Any, ...] = ()) -> np.ndarray:
        """Read the array `name`, or its part at the index `where`.

        Raises:
          Damaged: the stored data is missing or invalid.
          Unreadable: the system could not read it.
        """
        try:
            leaf = self._leaves.get(name, {})
            if "at" in leaf:
                return unpack_array(self._small_arrays(), leaf)[where]
            return self._array(name, where)
        except (ValueError, TypeError, IndexError, OverflowError, OSError) as error:
            why = " ".join(str(error).split())[:200]
            message = f"The array {name} in {self.folder} cannot be read: {why}"
            # A system error other than a missing file does not mean that the data is damaged.
            system = re.search(r"OS error (\d+)", str(error))
            if system is not None and int(system.group(1)) != errno.ENOENT:
                raise Unreadable(message) from error
            raise Damaged(message) from error

    def _array(self, name: str, where: tuple[Any, ...] = ()) -> np.ndarray:
        if name not in self._open:
            spec = {"driver": "zarr3", "kvstore": {**self._store, "path": f"{name}/"}}
            self._open[name] = tensorstore.open(spec, open=True, read=True, context=self._context).result()
        return np.asarray(self._open[name][where].read().result())

    def _small_arrays(self) -> np.ndarray:
        with self._lock:  # the first thread reads for all
            if self._small is None:
                self._small = self._array(SMALL_ARRAYS)
            return self._small


def wrong_parts(
    reader: CheckpointReader, expected: Digests, count: Callable[[int], object] = lambda size: None
) -> Iterator[str]:
    """Read the array parts that `expected` names; yield a message for each that does not match its checksum.

    `count` is called with the bytes of each part that was read.
    """

    def check(job: tuple[str, str, str]) -> str | None:
        name, where, text = job
        try:
            part = reader.read(name, read_slice(where))
        except Damaged as error:
            return str(error)
        count(part.nbytes)
        if array_digest(part) == text:
            return None
        return f"The array {name}[{where}] in {reader.folder} does not match its checksum."

    jobs = [(name, where, text) for name, parts in expected.items() for where, text in parts.items()]
    with ThreadPoolExecutor(_THREADS, "verify") as pool:
        yield from filter(None, pool.map(check, jobs))


def verify_checkpoint(folder: Path) -> list[str]:
    """Read a whole checkpoint and list its damage; an empty list means it is intact.

    For a checkpoint saved without digests, only the names and sizes of files are checked.

    Raises:
      InputError: the checkpoint has a newer format.
    """
    try:
        manifest = read_manifest(folder)
        expected = read_digests(folder, manifest)
    except Damaged as error:
        return [str(error)]
    with WorkProgress(f"verifying {folder.name}", sum(manifest.files.values())) as progress:
        return list(wrong_parts(CheckpointReader(folder, manifest.leaves), expected, progress.add))
