"""Save the arrays of a checkpoint: each process writes its shards with Orbax, and their digests."""

import functools
import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from zaya_jax.checkpoint.arrays import pack_arrays
from zaya_jax.checkpoint.digest import PIECE, digests
from zaya_jax.checkpoint.reader import CheckpointReader, wrong_parts
from zaya_jax.errors import as_sentence
from zaya_jax.run.digests import joined, leaf_digest, uncovered
from zaya_jax.run.files import sync_folder, write_atomically
from zaya_jax.run.manifest import DIGESTS, STATE, Manifest, file_digests, list_files, write_manifest
from zaya_jax.run.plain_path import plain_path
from zaya_jax.run.writing import make_folder

_HANDLERS = ocp.handlers.local_registry(include_global_registry=False)
_HANDLERS.add(ocp.handlers.PyTreeHandler)


class Saving:
    """A checkpoint that is being saved into the temporary folder `work`."""

    def __init__(self, work: Path, arrays: Mapping[str, jax.Array], verify: str) -> None:
        """Start to write this process's part of `arrays`, see `start_save`; `verify` is `checkpoint.verify`."""
        packed = pack_arrays(arrays)
        self._work, self._verify = work, verify
        self._parts = packed.large_parts() if verify != "none" else []
        self._wait = start_save(work, packed.arrays)
        self._packed = packed._replace(arrays={})  # the next step may donate them

    def complete(self) -> str:
        """Wait until this process's arrays and their digests are durable; return why that failed, else ''."""
        try:
            if self._verify != "none":
                self._parts += self._packed.small_parts()
            own_digests = digests(self._parts)
            self._wait()
            if self._verify != "none":
                folder = self._work / DIGESTS
                make_folder(folder)
                write_atomically(folder / f"process_{jax.process_index()}.json", json.dumps(own_digests))
                sync_folder(folder)
            self._parts.clear()
            if self._verify == "readback":
                return next(wrong_parts(CheckpointReader(self._work, self._packed.leaves), own_digests), "")
        except Exception as error:  # training continues after any error
            return as_sentence(error)
        return ""

    def write_manifest(self, step: int, token: int, metadata: dict[str, Any]) -> str:
        """Write the manifest, once all processes are complete; return which digests are missing, else ''."""
        work, leaves, verifying = self._work, self._packed.leaves, self._verify != "none"
        saved = joined(json.loads(path.read_bytes()) for path in sorted((work / DIGESTS).glob("*.json")))
        missing = uncovered(saved, {name: leaf["shape"] for name, leaf in leaves.items()})
        if verifying and missing:
            return f"{work} lacks digests of {missing[0]}. Check that all processes see the same run_dir."
        for name in saved.keys() & leaves.keys():
            leaves[name]["digest"] = leaf_digest(saved[name])
        files, checked = list_files(work), file_digests(work) if verifying else {}
        write_manifest(work, Manifest(step, token, metadata, leaves, files, checked, self._verify == "readback"))
        return ""


def start_save(work: Path, arrays: Mapping[str, Any]) -> Callable[[], None]:
    """Start writing arrays into the new folder `work` in the background; the arrays can be donated at once.

    Process 0 writes numpy arrays. Returns a function that waits until this process's arrays are durable. Both raise the
    errors of Orbax, perhaps in this process only, so its logging is silenced until the save ends.
    """
    log = logging.getLogger("absl")
    level = log.level
    # After one of Orbax's threads has failed, others can fail later, so the filter stays; a logger adds it once.
    log.addFilter(_is_not_from_signaling_thread)
    _hide_closed_loops()
    log.setLevel(logging.CRITICAL)
    try:
        with _context():
            response = ocp.save_checkpointables_async(str(plain_path(work.parent) / work.name), {STATE: dict(arrays)})
    except BaseException:
        log.setLevel(level)
        raise

    def wait() -> None:
        try:
            response.result()
        finally:
            log.setLevel(level)

    return wait


def _context() -> ocp.Context:
    context = ocp.Context()
    # The default registry would instantiate every handler twice per save to find the one for a tree of arrays.
    context.checkpointables.registry = _HANDLERS
    context.file.path_permission_mode = 0o700  # nobody can put links where Orbax and tensorstore follow them
    # Compression saves 8 % on fp32 weights, for twice the time and a copy in memory.
    saving = context.array.saving
    saving.use_compression = False
    saving.scoped_storage_options_creator = _in_chunks
    saving.enable_pinned_host_transfer = False  # digests already need a host copy; avoid a second one
    return context


def _in_chunks(key: Any, value: Any) -> Any:
    """Chunk large arrays: reading a part loads all its chunks into memory."""
    del key
    if value.nbytes <= PIECE:
        return None
    return ocp.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=PIECE, shard_axes=(0,))


@functools.cache  # install the hook only once
def _hide_closed_loops() -> None:
    """Suppress tracebacks of tensorstore operations that end after Orbax closed the event loop of a failed save."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def _is_not_from_signaling_thread(record: logging.LogRecord) -> bool:
    return "_SignalingThread.run() raised" not in str(record.msg)
