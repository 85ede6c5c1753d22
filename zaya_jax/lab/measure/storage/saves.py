"""Saves and restores of a training state's size."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zaya_jax.checkpoint.reader import verify_checkpoint
from zaya_jax.checkpoint.restore import restore_newest
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import CheckpointConfig
from zaya_jax.lab.measure.storage.reads import drop_cached
from zaya_jax.lab.measure.timing import elapsed

LARGE = 16  # number of large arrays, which share the state's size
_SMALL = 100  # number of small ones of 1 KiB


class Method(NamedTuple):
    """A way to save: `start` blocks the step loop, and `finish` waits until the files are durable."""

    start: Callable[[int], None]
    finish: Callable[[], None]
    restore: Callable[[], Any]
    verify: Callable[[], None] | None = None  # process 0 only


def time_saves(folder: Path, size: int, repeats: int) -> dict[str, list[float]]:
    """Save and restore arrays of `size` bytes in all, on the first device; a first, untimed repeat starts Orbax.

    Returns:
      Seconds of each repeat: `stall`, until training continues; `commit`, until the checkpoint is durable; `cold` and
      `warm`, to restore and verify it from the storage and from the page cache.

    Raises:
      RuntimeError: a save fails, or a restored array differs.
    """
    state = make_state(size, _SMALL, jax.devices()[:1])
    method = make_method(folder, state, abstract(state))._replace(verify=None)  # restoring verifies, too
    rows = [time_save(method, step) | time_restores(method, folder, state) for step in range(repeats + 1)][1:]
    return {name.removeprefix("restore_"): [row[name] for row in rows] for name in rows[0]}


def make_state(size: int, small: int, devices: Sequence[Any]) -> dict[str, jax.Array]:
    """Make large arrays of `size` bytes in all, sharded over the devices, and `small` arrays of 1 KiB, replicated."""
    mesh = jax.make_mesh((len(devices),), ("data",), axis_types=(AxisType.Auto,), devices=devices)
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    rows = size // LARGE // 4 // 1024 // len(devices) * len(devices)

    def draw() -> dict[str, jax.Array]:
        key = jax.random.key(0)
        large = {f"large.{i}": jax.random.normal(jax.random.fold_in(key, i), (rows, 1024)) for i in range(LARGE)}
        return large | {f"small.{i}": jnp.full((256,), float(i)) for i in range(small)}

    placed = {name: split if name.startswith("large") else whole for name in jax.eval_shape(draw)}
    return jax.block_until_ready(jax.jit(draw, out_shardings=placed)())


def abstract(state: dict[str, jax.Array]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes, dtypes and shardings of a state."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def make_method(folder: Path, state: Any, abstract: Any, verify: Any = "hash") -> Method:
    """Save with this project's own checkpoints; `verify` is the key `checkpoint.verify`."""
    store = CheckpointStore(folder, CheckpointConfig(keep=1, verify=verify))

    def start(step: int) -> None:
        store.save(step, state, {"heldout_loss": None})

    def finish() -> None:
        if not store.wait():
            raise RuntimeError(f"The state could not be saved in {folder}.")

    def restore() -> Any:
        restored = restore_newest(CheckpointStore(folder, CheckpointConfig()), lambda _: abstract, print)
        return None if restored is None else restored.state

    def verify_newest() -> None:
        step = store.latest()
        if jax.process_index() == 0 and step is not None and (wrong := verify_checkpoint(folder / str(step))):
            raise RuntimeError(wrong[0])

    return Method(start, finish, restore, verify_newest if verify != "none" else None)


def time_save(method: Method, step: int) -> dict[str, float]:
    """Save once; return `stall` and `commit` (until durable), s: the maximum over processes."""
    stall = elapsed(lambda: method.start(step))
    commit = stall + elapsed(method.finish)
    return {"stall": largest(stall), "commit": largest(commit)}


def time_restores(method: Method, folder: Path, state: dict[str, jax.Array]) -> dict[str, float]:
    """Return the seconds to restore and to verify, from a cold and from a warm page cache.

    Raises:
      RuntimeError: a restored array differs from that of `state`.
    """
    seconds, arrays = dict[str, float](), dict[str, jax.Array]()

    def restore() -> None:
        arrays.update(jax.block_until_ready(method.restore()))

    for kind in ("cold", "warm"):
        if kind == "cold":
            drop_cached(folder)
        multihost_utils.sync_global_devices("restore")
        seconds[f"restore_{kind}"] = largest(elapsed(restore))
        for name, x in state.items():
            for saved, read in zip(x.addressable_shards, arrays[name].addressable_shards, strict=True):
                if not np.array_equal(saved.data, read.data):
                    raise RuntimeError(f"{name} was restored from {folder} with wrong values.")
        arrays.clear()
        if method.verify is not None:
            seconds[f"verify_{kind}"] = largest(elapsed(method.verify))
    return seconds


def largest(value: float) -> float:
    """Return the maximum over all processes."""
    return float(np.max(multihost_utils.process_allgather(np.float32(value))))
