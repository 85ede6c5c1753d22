"""Read and verify the arrays of a checkpoint in host memory, without devices."""

import errno
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tensorstore

from zaya_jax.checkpoint.arrays import SMALL_ARRAYS, unpack_array
from zaya_jax.checkpoint.digest import array_digest
from zaya_jax.errors import as_sentence
from zaya_jax.run.digests import Digests, read_slice
from zaya_jax.run.manifest import STATE, Damaged, Manifest, Unreadable, read_digests, read_manifest
from zaya_jax.run.plain_path import plain_path
from zaya_jax.run.progress import WorkProgress

T = TypeVar("T")
_THREADS = 4  # each reads one piece of an array at a time
_CACHE = 2**26  # bytes, for the storage index
# Errors of a busy system or network, which a second attempt may not meet, and the seconds before each attempt.
_PASSING = {errno.EAGAIN, errno.EINTR, errno.EIO, errno.ESTALE, errno.ETIMEDOUT}
_PASSING |= {errno.ENFILE, errno.EMFILE, errno.ENOMEM, errno.EBUSY}
_PAUSES = (0.2, 1.0, 3.0)


class CheckpointReader:
    """Reads arrays of the checkpoint in `folder`, finished or not; `leaves` and `files` are the manifest's."""

    def __init__(
        self, folder: Path, leaves: Mapping[str, Mapping[str, Any]], files: Mapping[str, int] | None = None
    ) -> None:
        self.folder = folder
        self._leaves = leaves
        self._files = files or {}
        self._small: np.ndarray | None = None
        self._lock = threading.Lock()
        self._store = {"driver": "ocdbt", "base": f"file://{plain_path(folder)}/{STATE}/"}
        self._open: dict[str, Any] = {}
        # Arrays share one context, or each would read the storage index again.
        self._context = tensorstore.Context({"cache_pool": {"total_bytes_limit": _CACHE}})

    def read(self, name: str, index: tuple[Any, ...] = ()) -> np.ndarray:
        """Read the array `name`, or its part at the index `index`.

        `Damaged` if a file is missing or cut, a checksum of the storage format differs, or the manifest contradicts it;
        `Unreadable` if it cannot be read for any other reason, also after a while where that can help.
        """
        return retried(lambda: self._read(name, index))

    def _read(self, name: str, index: tuple[Any, ...]) -> np.ndarray:
        try:
            leaf = self._leaves.get(name, {})
            if "at" in leaf:
                return unpack_array(self._small_arrays(), leaf)[index]
            return self._array(name, index)
        except (ValueError, TypeError, IndexError, OverflowError, OSError) as error:
            self._open.pop(name, None)
            message = f"The array {name} in {self.folder} cannot be read: {as_sentence(error)}"
            if self._is_damaged(error):
                raise Damaged(message) from error
            raise Unreadable(f"{message} The checkpoint may be intact.") from error

    def _is_damaged(self, error: Exception) -> bool:
        if isinstance(error, OSError) or _system_error(error) not in (0, errno.ENOENT) or not self.folder.is_dir():
            return False
        # tensorstore says so of checksums and lengths that differ. Its errors are plain `ValueError`s.
        if type(error) is not ValueError or re.search(r"DATA_LOSS|Error decoding", str(error)):
            return True
        sizes = ((self.folder / name, size) for name, size in self._files.items())
        return any(not path.is_file() or path.stat().st_size != size for path, size in sizes)

    def _array(self, name: str, index: tuple[Any, ...] = ()) -> np.ndarray:
        if name not in self._open:
            spec = {"driver": "zarr3", "kvstore": {**self._store, "path": f"{name}/"}}
            self._open[name] = tensorstore.open(spec, open=True, read=True, context=self._context).result()
        return np.asarray(self._open[name][index].read().result())

    def _small_arrays(self) -> np.ndarray:
        with self._lock:  # the first thread reads for all
            if self._small is None:
                self._small = self._array(SMALL_ARRAYS)
            return self._small


def open_checkpoint(folder: Path) -> tuple[Manifest, CheckpointReader]:
    """Open a checkpoint without verifying its arrays; `InputError` if its manifest or a file's size shows damage."""
    manifest = read_manifest(folder)
    return manifest, CheckpointReader(folder, manifest.leaves, manifest.files)


def saved_slices(folder: Path, manifest: Manifest) -> dict[str, list[str]]:
    """Return the slices in which each array was saved; one slice of the whole array if that is unknown."""
    digests = read_digests(folder, manifest)
    full_spans = {name: ",".join(f"0:{size}" for size in leaf["shape"]) for name, leaf in manifest.leaves.items()}
    return {name: sorted(digests.get(name, {full_spans[name]: ""})) for name in manifest.leaves}


def retried(read: Callable[[], T]) -> T:
    """Call `read`; after an error that a second attempt may not meet, call it again, for a few seconds."""
    for pause in _PAUSES:
        try:
            return read()
        except Unreadable as error:
            if _system_error(error.__cause__) not in _PASSING:
                raise
        time.sleep(pause)
    return read()


def _system_error(error: BaseException | None) -> int:
    match = re.search(r"os_error_code='(\d+)'|OS error (\d+)", str(error))
    return int(match[1] or match[2]) if match else getattr(error, "errno", None) or 0


def wrong_parts(
    reader: CheckpointReader, expected: Digests, count: Callable[[int], object] = lambda size: None
) -> Iterator[str]:
    """Read the array parts that `expected` names; yield a message for each that does not match its checksum.

    `count` is called with the bytes of each part that was read.
    """

    def check(job: tuple[str, str, str]) -> str | None:
        name, span, text = job
        try:
            part = reader.read(name, read_slice(span))
        except Damaged as error:
            return str(error)
        count(part.nbytes)
        if array_digest(part) == text:
            return None
        return f"The array {name}[{span}] in {reader.folder} does not match its checksum."

    jobs = [(name, span, text) for name, parts in expected.items() for span, text in parts.items()]
    with ThreadPoolExecutor(_THREADS, "verify") as pool:
        yield from filter(None, pool.map(check, jobs))


def verify_checkpoint(folder: Path) -> list[str]:
    """Read a whole checkpoint and list its damage; an empty list means it is intact.

    Without digests, only the names and sizes of files are checked. `InputError` if the checkpoint has a newer format.
    """
    try:
        manifest = retried(lambda: read_manifest(folder))
        expected = read_digests(folder, manifest)
    except Damaged as error:
        return [str(error)]
    with WorkProgress(f"verifying {folder.name}", sum(manifest.files.values())) as progress:
        return list(wrong_parts(CheckpointReader(folder, manifest.leaves, manifest.files), expected, progress.add))
