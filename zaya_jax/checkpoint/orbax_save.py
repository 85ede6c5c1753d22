"""Asynchronous saving of arrays with Orbax; each process writes its own shards."""

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from zaya_jax.checkpoint.digest import PIECE
from zaya_jax.run.manifest import STATE
from zaya_jax.run.plain_path import plain_path

_HANDLERS = ocp.handlers.local_registry(include_global_registry=False)
_HANDLERS.add(ocp.handlers.PyTreeHandler)


def start_save(work: Path, arrays: Mapping[str, Any]) -> Callable[[], None]:
    """Start writing arrays into the folder `work` in the background; the arrays can be donated at once.

    Orbax's logging is silenced until the save ends, because its errors are raised here.

    Args:
      work: a new folder.
      arrays: by name; process 0 writes numpy arrays.

    Returns:
      A function that waits until this process's arrays are durable, and raises any error of writing them.

    Raises:
      ValueError, OSError, RuntimeError, MemoryError: from Orbax, perhaps in this process only.
    """
    log = logging.getLogger("absl")
    level = log.level
    # After one of Orbax's threads has failed, others can fail later, so the filter stays.
    log.addFilter(_is_of_no_thread)
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


def _is_of_no_thread(record: logging.LogRecord) -> bool:
    return "_SignalingThread.run() raised" not in str(record.msg)
