"""Arrays of a save, given to Orbax: which writes them in the background, each process its own."""

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from zaya_jax.checkpoint.digest import PIECE
from zaya_jax.run.manifest import STATE

_HANDLERS = ocp.handlers.local_registry(include_global_registry=False)
_HANDLERS.add(ocp.handlers.PyTreeHandler)


def start_save(work: Path, arrays: Mapping[str, Any]) -> Callable[[], None]:
    """Write arrays into the folder `work` in the background; they may be donated at once.

    Until the end Orbax logs nothing, in whichever thread: errors are raised here.

    Args:
      work: a new folder.
      arrays: by name; arrays of numpy are written by process 0.

    Returns:
      Waits until this process's arrays are durable, and raises what writing them did.

    Raises:
      ValueError, OSError, RuntimeError, MemoryError: of Orbax, in this process and maybe not in others.
    """
    log = logging.getLogger("absl")
    level = log.level
    # Where one of Orbax's threads has failed, another may fail after the end. A filter is added once, for good.
    log.addFilter(_is_of_no_thread)
    _hide_closed_loops()
    log.setLevel(logging.CRITICAL)
    try:
        with _context():
            response = ocp.save_checkpointables_async(str(work), {STATE: dict(arrays)})
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
    # Orbax makes one of every handler it knows, twice a save, to find the one for a tree of arrays.
    context.checkpointables.registry = _HANDLERS
    # Compression saves 8 % of fp32 noise, for twice the time and a copy in memory.
    saving = context.array.saving
    saving.use_compression = False
    saving.scoped_storage_options_creator = _in_chunks
    saving.enable_pinned_host_transfer = False  # or there are two copies, with the one that digests are of
    return context


def _in_chunks(key: Any, value: Any) -> Any:
    """How Orbax cuts a large array: whoever reads a part reads the chunks it lies in whole, and in memory."""
    del key
    if value.nbytes <= PIECE:
        return None
    return ocp.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=PIECE, shard_axes=(0,))


@functools.cache  # a hook is set once, for good
def _hide_closed_loops() -> None:
    """Print no traceback where tensorstore ends an operation of a failed save whose event loop Orbax has closed."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook


def _is_of_no_thread(record: logging.LogRecord) -> bool:
    return "_SignalingThread.run() raised" not in str(record.msg)
