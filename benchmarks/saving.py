"""One process of a job that saves the same state with several methods, in turn, and times each."""

import functools
import gc
import math
import os
import pickle
import re
import shutil
import statistics
import threading
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from zaya_jax.job.multihost import join
from zaya_jax.lab.measure.storage import saves
from zaya_jax.lab.measure.storage.saves import Method
from zaya_jax.lab.timing import elapsed, timed
from zaya_jax.run.files import sync_folder

_SMALL = 1000  # number of arrays of 1 KiB, besides the large ones
_WIDTH, _STEPS = 512, 20  # matrix width of a fake training step, and number of steps timed without saving


class Job(NamedTuple):
    """A job, and the index of this process."""

    folder: Path
    coordinator: str
    processes: int
    process: int
    size: int  # bytes of a state
    repeats: int


def measure(job: Job) -> list[dict[str, Any]]:
    """Save and restore together with the other processes; returns one row for each method and turn."""
    if job.processes > 1:
        join(job.coordinator, job.processes, job.process, 120, 600.0)
    state = saves.make_state(job.size, _SMALL, jax.devices())
    methods = make_methods(job.folder, state)
    rows: list[dict[str, Any]] = []
    for turn in range(job.repeats + 1):
        for name, method in methods.items():
            row = {"way": name, "turn": turn, **timed_save(method, turn)}
            if turn == job.repeats:
                row |= saves.time_restores(method, job.folder, state) | timed_steps(method, turn + 1)
            if turn:  # the first turn is a warm-up
                rows.append(row)
    if job.processes > 1:
        jax.distributed.shutdown()  # together, since the processes are ended one after the other
    return rows


def make_methods(folder: Path, state: dict[str, jax.Array]) -> dict[str, Method]:
    """Make the methods: gather and pickle; Orbax with its defaults; this project, with and without digests."""
    shapes = saves.abstract(state)
    return {
        "gather and pickle": _pickled(folder / "pickle", state, shapes),
        "Orbax": _orbax(folder / "orbax", state, shapes, wait=True),
        "Orbax, asynchronous": _orbax(folder / "orbax_async", state, shapes, wait=False),
        "verified": saves.make_method(folder / "verified", state, shapes),
        "without digests": saves.make_method(folder / "unverified", state, shapes, "none"),
    }


def _pickled(folder: Path, state: Any, abstract: Any) -> Method:
    path = folder / "state.pickle"

    def start(step: int) -> None:
        gather = functools.partial(multihost_utils.process_allgather, tiled=True)
        host = {name: np.asarray(x) if x.is_fully_replicated else gather(x) for name, x in state.items()}
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
        make = jax.make_array_from_callback
        return {name: make(x.shape, abstract[name].sharding, x.__getitem__) for name, x in host.items()}

    return Method(start, lambda: None, restore)


def _orbax(folder: Path, state: Any, abstract: Any, wait: bool) -> Method:
    response: Any = None
    newest = 0

    def start(step: int) -> None:
        nonlocal response, newest
        newest, response = step, ocp.save_checkpointables_async(str(folder / str(step)), {"state": state})
        if wait:
            response.result()

    def finish() -> None:
        response.result()
        if jax.process_index() == 0:
            shutil.rmtree(folder / str(newest - 1), ignore_errors=True)

    def restore() -> Any:
        return ocp.load_checkpointables(str(folder / str(newest)), {"state": abstract})["state"]

    return Method(start, finish, restore)


def timed_save(method: Method, step: int) -> dict[str, float]:
    """Save once; return the figures of `time_save`, and `memory`, bytes: the maximum over processes."""
    gc.collect()
    multihost_utils.sync_global_devices("save")
    before = restart_peak()
    figures = saves.time_save(method, step)
    return figures | {"memory": saves.largest(peak_memory() - before)}


def restart_peak() -> int:
    """Let the kernel count this process' peak memory anew (proc(5)), and return the resident memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return peak_memory()


def peak_memory() -> int:
    """Return this process' peak resident memory in bytes, as the kernel counts it."""
    return 1024 * int(re.findall(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))[0])


def timed_steps(method: Method, step: int) -> dict[str, float]:
    """Return the duration of a step during a save, relative to one without, in the slowest process; NaN if none ran."""
    multiply = jax.jit(lambda x: x @ x)
    x = jnp.full((_WIDTH, _WIDTH), 1 / _WIDTH)

    def one_step() -> None:
        multiply(x).block_until_ready()

    multihost_utils.sync_global_devices("steps alone")
    alone = statistics.median(timed(one_step, _STEPS))
    multihost_utils.sync_global_devices("steps beside saving")
    method.start(step)
    finishing = threading.Thread(target=method.finish)
    finishing.start()
    beside = []
    while finishing.is_alive():
        beside.append(elapsed(one_step))
    finishing.join()
    return {"step_inflation": saves.largest(statistics.mean(beside) / alone if beside else math.nan)}
