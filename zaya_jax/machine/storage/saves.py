"""Saves and restores of a training state's size, with this project's own checkpoints."""

import time
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.checkpoint.restore import restore_newest
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import CheckpointConfig
from zaya_jax.machine.storage.page_cache import drop_cached

_LARGE, _SMALL = 16, 100  # number of large arrays, which share the size, and of small ones of 1 KiB


class SaveTiming(NamedTuple):
    """Seconds of each repeat.

    Attributes:
      stall: until training continues.
      commit: until the checkpoint is durable.
      cold: to restore and verify it, from the storage.
      warm: to restore and verify it, from the page cache.
    """

    stall: list[float]
    commit: list[float]
    cold: list[float]
    warm: list[float]


def time_saves(folder: Path, size: int, repeats: int) -> SaveTiming:
    """Save and restore arrays of `size` bytes in all, on the first device; a first, untimed repeat starts Orbax.

    Raises:
      RuntimeError: a save fails, or a restored array differs.
    """
    rows = max(1, size // _LARGE // 4 // 1024)
    state = {f"large.{i}": jax.random.normal(jax.random.key(i), (rows, 1024)) for i in range(_LARGE)}
    state |= {f"small.{i}": jnp.full((256,), float(i)) for i in range(_SMALL)}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    store, saving = CheckpointStore(folder, CheckpointConfig(keep=1)), SaveTiming([], [], [], [])
    for step in range(repeats + 1):
        jax.block_until_ready(state)
        start = time.perf_counter()
        store.save(step, state, {"heldout_loss": None})
        saving.stall.append(time.perf_counter() - start)
        if not store.wait():
            raise RuntimeError(f"The state could not be saved in {folder}.")
        saving.commit.append(time.perf_counter() - start)
        for seconds, cold in ((saving.cold, True), (saving.warm, False)):
            if cold:
                drop_cached(folder)
            start = time.perf_counter()
            restored = restore_newest(CheckpointStore(folder, CheckpointConfig()), lambda _: abstract, print)
            arrays = jax.block_until_ready(None if restored is None else restored.state)
            seconds.append(time.perf_counter() - start)
            if arrays is None or not all(np.array_equal(x, arrays[name]) for name, x in state.items()):
                raise RuntimeError(f"The state was restored from {folder} with other values.")
            del restored, arrays
    return SaveTiming(*(seconds[1:] for seconds in saving))
