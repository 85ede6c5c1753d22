"""Arrays of a save, given to Orbax: which writes them in the background, each process its own."""

import functools
import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from orbax.checkpoint import v1 as ocp

from zaya_jax.checkpoint.digest import PIECE
from zaya_jax.run.manifest import STATE

_HANDLERS = ocp.handlers.local_registry(include_global_registry=False)
_HANDLERS.add(ocp.handlers.PyTreeHandler)


class OrbaxSave:
    """Arrays being written into the folder `work`, since it was made; they may be donated at once."""

    def __init__(self, work: Path, arrays: Mapping[str, Any]) -> None:
        """Begin; arrays of numpy are written by process 0.

        Raises:
          ValueError, OSError, RuntimeError, MemoryError: of Orbax, in this process and maybe not in others.
        """
        self._quiet = _Quiet()  # until the end: threads of Orbax's tell of errors whenever they meet them
        try:
            with _context():
                self._response = ocp.save_checkpointables_async(str(work), {STATE: dict(arrays)})
        except BaseException:
            self._quiet.end()
            raise

    def wait(self) -> None:
        """Until this process's arrays are durable; raises what writing them did."""
        try:
            self._response.result()
        finally:
            self._quiet.end()


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


class _Quiet:
    """From when it is made to its end Orbax tells nothing in the log: errors are told in a sentence of ours."""

    def __init__(self) -> None:
        self._level = logging.getLogger("absl").level
        # Where one of Orbax's threads has failed, another may fail after the end. A filter is added once, for good.
        logging.getLogger("absl").addFilter(_is_of_no_thread)
        _hide_closed_loops()
        logging.getLogger("absl").setLevel(logging.CRITICAL)

    def end(self) -> None:
        """Let the log be as it was."""
        logging.getLogger("absl").setLevel(self._level)


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
