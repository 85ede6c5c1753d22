"""One process of a job that saves the same state with several methods, in turn, and times each."""

import gc
import math
import os
import pickle
import shutil
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from orbax.checkpoint import v1 as ocp

from zaya_jax.bench.memory import PeakMemory
from zaya_jax.checkpoint.reader import verify_checkpoint
from zaya_jax.checkpoint.restore import restore_newest
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import CheckpointConfig
from zaya_jax.machine.storage.page_cache import drop_cached
from zaya_jax.parallel.multihost import join
from zaya_jax.run.files import sync_folder

LARGE, SMALL = 16, 1000  # number of large arrays, which share the state's size, and of small ones of 1 KiB
_WIDTH, _STEPS = 512, 20  # matrix width of a fake training step, and number of steps timed without saving


class Job(NamedTuple):
    """A job, and the index of this process."""

    folder: Path
    coordinator: str
    processes: int
    process: int
    size: int  # bytes of a state
    repeats: int


class Method(NamedTuple):
    """A way to save: `start` blocks the step loop, and `finish` waits until the files are durable."""

    start: Callable[[int], None]
    finish: Callable[[], None]
    restore: Callable[[], Any]
    verify: Callable[[], None] | None = None  # process 0 only


def measure(job: Job) -> list[dict[str, Any]]:
    """Save and restore together with the other processes; returns one row for each method and turn."""
    if job.processes > 1:
        join(job.coordinator, job.processes, job.process, 120, 600.0)
    state = make_state(job.size)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    methods = make_methods(job.folder, state, abstract)
    rows: list[dict[str, Any]] = []
    for turn in range(job.repeats + 1):
        for name, method in methods.items():
            row = {"way": name, "turn": turn, **timed_save(method, turn)}
            if turn == job.repeats:
                row |= timed_restores(method, job.folder, state) | timed_steps(method, turn + 1)
            if turn:  # the first turn is a warm-up
                rows.append(row)
    return rows


def make_state(size: int) -> dict[str, jax.Array]:
    """Make a few large arrays, sharded over the processes, and many small ones, replicated."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
    split, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    rows = size // LARGE // 4 // 1024 // jax.device_count() * jax.device_count()

    def draw() -> dict[str, jax.Array]:
        key = jax.random.key(0)
        large = {f"large.{i}": jax.random.normal(jax.random.fold_in(key, i), (rows, 1024)) for i in range(LARGE)}
        return large | {f"small.{i}": jnp.full((256,), float(i)) for i in range(SMALL)}

    placed = {name: split if name.startswith("large") else whole for name in jax.eval_shape(draw)}
    return jax.block_until_ready(jax.jit(draw, out_shardings=placed)())


def make_methods(folder: Path, state: Any, abstract: Any) -> dict[str, Method]:
    """Make the methods: gather and pickle; Orbax with its defaults; this project, with and without digests."""
    return {
        "gather and pickle": _pickled(folder / "pickle", state, abstract),
        "Orbax": _orbax(folder / "orbax", state, abstract, wait=True),
        "Orbax, asynchronous": _orbax(folder / "orbax_async", state, abstract, wait=False),
        "verified": _ours(folder / "verified", state, abstract, "hash"),
        "without digests": _ours(folder / "unverified", state, abstract, "none"),
    }


def _pickled(folder: Path, state: Any, abstract: Any) -> Method:
    path = folder / "state.pickle"

    def start(step: int) -> None:
        host = {name: np.asarray(x) if x.is_fully_replicated else multihost_utils.process_allgather(x, tiled=True)
                for name, x in state.items()}  # fmt: skip
        if jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "partial").open("wb") as file:
                pickle.dump(host, file, protocol=5)
                file.flush()
                os.fsync(file.fileno())
            (folder / "partial").rename(path)
            sync_folder(folder)
        multihost_utils.sync_global_devices("pickled")

    def restore() -> Any:
        with path.open("rb") as file:
            host = pickle.load(file)  # noqa: S301 (written above)
        return {name: jax.make_array_from_callback(x.shape, abstract[name].sharding, lambda i, x=x: x[i])
                for name, x in host.items()}  # fmt: skip

    return Method(start, lambda: None, restore)


def _orbax(folder: Path, state: Any, abstract: Any, wait: bool) -> Method:
    responses: list[Any] = []
    newest = [0]

    def start(step: int) -> None:
        newest[0] = step
        response = ocp.save_checkpointables_async(str(folder / str(step)), {"state": state})
        if wait:
            response.result()
        responses.append(response)

    def finish() -> None:
        responses.pop().result()
        if jax.process_index() == 0:
            shutil.rmtree(folder / str(newest[0] - 1), ignore_errors=True)

    def restore() -> Any:
        return ocp.load_checkpointables(str(folder / str(newest[0])), {"state": abstract})["state"]

    return Method(start, finish, restore)


def _ours(folder: Path, state: Any, abstract: Any, verify: Any) -> Method:
    store = CheckpointStore(folder, CheckpointConfig(keep=1, verify=verify))

    def finish() -> None:
        if not store.wait():
            raise RuntimeError("The state could not be saved.")

    def restore() -> Any:
        restored = restore_newest(CheckpointStore(folder, CheckpointConfig()), lambda manifest: abstract, print)
        return None if restored is None else restored.state

    def verify_newest() -> None:
        step = store.latest()
        if jax.process_index() == 0 and step is not None and (wrong := verify_checkpoint(folder / str(step))):
            raise RuntimeError(wrong[0])

    def start(step: int) -> None:
        store.save(step, state, {"heldout_loss": None})

    return Method(start, finish, restore, verify_newest if verify != "none" else None)


def timed_save(method: Method, step: int) -> dict[str, float]:
    """Save once; return `stall` and `commit` (until durable), s, and `memory`, bytes: the maximum over processes."""
    gc.collect()
    multihost_utils.sync_global_devices("save")
    with PeakMemory() as peak:
        start = time.perf_counter()
        method.start(step)
        stall = time.perf_counter() - start
        method.finish()
        commit = time.perf_counter() - start
    return {"stall": _largest(stall), "commit": _largest(commit), "memory": _largest(peak.bytes - peak.before)}


def timed_steps(method: Method, step: int) -> dict[str, float]:
    """Return the duration of a step during a save, relative to one without, in the slowest process; NaN if none ran."""
    multiply = jax.jit(lambda x: x @ x)
    x = jnp.full((_WIDTH, _WIDTH), 1 / _WIDTH)

    def time_multiply() -> float:
        start = time.perf_counter()
        multiply(x).block_until_ready()
        return time.perf_counter() - start

    multihost_utils.sync_global_devices("steps alone")
    time_multiply()
    alone = statistics.median(time_multiply() for _ in range(_STEPS))
    multihost_utils.sync_global_devices("steps beside saving")
    method.start(step)
    finishing = threading.Thread(target=method.finish)
    finishing.start()
    beside = []
    while finishing.is_alive():
        beside.append(time_multiply())
    finishing.join()
    return {"step_inflation": _largest(statistics.mean(beside) / alone if beside else math.nan)}


def timed_restores(method: Method, folder: Path, state: Any) -> dict[str, float]:
    """Return the seconds to restore and verify, from a cold and from a warm page cache."""
    seconds = {}
    for kind in ("cold", "warm"):
        if kind == "cold":
            drop_cached(folder)
        multihost_utils.sync_global_devices("restore")
        start = time.perf_counter()
        arrays = jax.block_until_ready(method.restore())
        seconds[f"restore_{kind}"] = _largest(time.perf_counter() - start)
        for name, x in state.items():
            for saved, read in zip(x.addressable_shards, arrays[name].addressable_shards, strict=True):
                if not np.array_equal(saved.data, read.data):
                    raise RuntimeError(f"{name} was restored with wrong values.")
        del arrays
        if method.verify is not None:
            start = time.perf_counter()
            method.verify()
            seconds[f"verify_{kind}"] = _largest(time.perf_counter() - start)
    return seconds


def _largest(value: float) -> float:
    """Return the maximum over all processes."""
    return float(np.max(multihost_utils.process_allgather(np.float32(value))))
