"""Time saving and restoring in several processes, against gather-and-pickle and against Orbax with its defaults."""

import argparse
import functools
import gc
import itertools
import os
import pickle
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from orbax.checkpoint import v1 as ocp

from benchmarks.benchmark_command import command, flag, peak_memory
from zaya_jax.config.checks import counted, require
from zaya_jax.job.multihost import join
from zaya_jax.lab.measure import storage
from zaya_jax.lab.measure.storage import Method
from zaya_jax.lab.result import describe_run
from zaya_jax.lab.result_plots import draw_lines
from zaya_jax.lab.subprocesses import restored_environment, run_in_subprocess
from zaya_jax.run.files import sync_folder
from zaya_jax.run.listening import reserved_port
from zaya_jax.run.table import format_table

_FIGURES = ("stall", "commit", "restore_cold", "restore_warm", "memory")
PEER, OURS, BARE = "gather and pickle", "verified", "without digests"
_HEAD = ("medians, in seconds", "training waits", "durable after", "restore from disk", "restore cached", "peak memory")
_NAMES: dict[str, str] = {OURS: "zaya_jax", BARE: "zaya_jax, no checksums"}  # in the printed table
_SMALL = 1000  # number of arrays of 1 KiB, besides the large ones


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time saving and restoring against Orbax and gather-and-pickle.

    Measures how long a save blocks training, when the checkpoint is durable, and how long it takes to restore, with
    several processes on one disk.

    checkpoint --gib 2 --processes 1 4 --png saving.png
    """
    for name, values in (("--gib", parsed.gib), ("--processes", parsed.processes)):
        require(min(values) > 0, name, min(values), "above 0")
    folder: str | None = parsed.folder
    require(folder is None or Path(folder).is_dir(), "--folder", folder, "an existing folder")
    result = describe_run(
        "seconds that a save blocks the step loop, until the checkpoint is durable, and to restore it",
        f"states of {', '.join(f'{size:g}' for size in parsed.gib)} GiB, 16 large arrays and 1,000 of 1 KiB",
        "process_allgather to process 0, which pickles",
        ("orbax-checkpoint", "tensorstore"),
    )
    result["results"] = []
    with tempfile.TemporaryDirectory(prefix="bench_checkpoint_", dir=folder) as name:
        result["hardware"]["disk"] = describe_disk(Path(name))
        for size, count in itertools.product(parsed.gib, parsed.processes):
            rows = run_job(Path(name), count, round(size * 2**30), parsed.repeats)
            result["results"].append(summary(size, count, rows))
            print_table(result["results"][-1])
    if parsed.png:
        _draw(Path(parsed.png), max(parsed.gib), result["results"])
    return result


def describe_disk(folder: Path) -> dict[str, Any]:
    """Describe a disk: file system, free space, and the speed of writing one durable file of 256 MiB."""
    blocks = [os.urandom(2**20)] * 256
    start = time.perf_counter()
    with (folder / "speed").open("wb") as file:
        file.writelines(blocks)
        file.flush()
        os.fdatasync(file.fileno())
    seconds = time.perf_counter() - start
    (folder / "speed").unlink()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    _, kind = max((len(where), kind) for where, kind in mounts if folder.resolve().is_relative_to(where))
    speed, free = round(256 * 1.048576 / seconds), shutil.disk_usage(folder).free
    return {"file_system": kind, "mb_per_second": speed, "free_bytes": free}


def run_job(folder: Path, processes: int, size: int, repeats: int) -> list[dict[str, Any]]:
    """Run one job, and return what its processes measured: one row per method and turn."""
    work = folder / f"{processes}_{size}"
    work.mkdir()
    with reserved_port() as coordinator, restored_environment(), ExitStack() as stack:
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
        job = measure, work, size, repeats, coordinator, processes
        started = [run_in_subprocess(functools.partial, *job, process) for process in range(processes)]
        steps = [stack.enter_context(each) for each in started]
        with ThreadPoolExecutor(processes) as pool:  # concurrently, since the processes wait for each other
            rows, *_ = pool.map(lambda step: step(), steps)
    shutil.rmtree(work)
    return rows


def summary(size: float, processes: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return median, minimum and maximum of each figure, and ratios of medians to the peer's."""
    ways: dict[str, dict[str, Any]] = {}
    for row in rows:
        for key in _FIGURES:
            if key in row:
                ways.setdefault(row["way"], {}).setdefault(key, []).append(row[key])
    statistic = {"median": statistics.median, "least": min, "most": max}
    table = {
        way: {key: {name: each(values) for name, each in statistic.items()} for key, values in figures.items()}
        for way, figures in ways.items()
    }

    def ratio(key: str, way: str, other: str) -> float:
        return table[way][key]["median"] / table[other][key]["median"]

    keys = {"stall_ratio": "stall", "commit_ratio": "commit", "restore_ratio": "restore_warm"}
    ratios = {name: ratio(key, PEER, OURS) for name, key in keys.items()}
    ratios["digest_share"] = ratio("commit", OURS, BARE) - 1
    return {"gib": size, "processes": processes, "ways": table, **ratios}


def print_table(job: dict[str, Any]) -> None:
    """Print the figures of one job as a table. Memory is the increase during a save in the largest process."""
    durable, restored = f"{job['commit_ratio']:.2f}× as fast", f"{job['restore_ratio']:.2f}× as fast"
    print(f"{job['gib']:g} GiB, {counted(job['processes'], 'process', 'es')}:")
    print(f"  {PEER} blocks training {job['stall_ratio']:.1f}× as long as zaya_jax")
    print(f"  compared with it, zaya_jax makes the checkpoint durable {durable}", end=", ")
    print(f"and restores it with checksums {restored}")
    print(f"  checksums add {100 * job['digest_share']:.1f} % to the time until the checkpoint is durable")
    lines: list[Sequence[str]] = [_HEAD]
    for way, figures in job["ways"].items():
        median = {key: each["median"] for key, each in figures.items()}
        cells = [f"{median[key]:.3f}" for key in ("stall", "commit", "restore_cold", "restore_warm")]
        lines.append([_NAMES.get(way, str(way)), *cells, f"{median['memory'] / 2**20:.0f} MiB"])
    print("\n".join(format_table(lines)))


def _draw(path: Path, size: float, results: list[dict[str, Any]]) -> None:
    jobs = [job for job in results if job["gib"] == size]
    counts, times = [job["processes"] for job in jobs], {"stall": "training waits", "commit": "durable after"}
    lines = {
        f"{way}: {what}": (counts, [job["ways"][way][key]["median"] for job in jobs])
        for key, what in times.items()
        for way in jobs[0]["ways"]
    }
    title = f"Saving {size:g} GiB: how long training waits, and when the checkpoint is durable"
    draw_lines(path, lines, title=title, x="number of processes", y="time (s)", logarithmic="y")


# --- one process of a job that saves the same state with several methods, in turn, and times each ----------------


def measure(
    folder: Path, size: int, repeats: int, coordinator: str, processes: int, process: int
) -> list[dict[str, Any]]:
    """Save and restore a state of `size` bytes with the other processes; returns one row for each method and turn."""
    if processes > 1:
        join((coordinator, processes, process), 120, 600.0)
    state = storage.make_state(size, _SMALL, jax.devices())
    methods = make_methods(folder, state)
    rows: list[dict[str, Any]] = []
    for turn in range(repeats + 1):
        for name, method in methods.items():
            row = {"way": name, "turn": turn, **timed_save(method, turn)}
            if turn == repeats:
                row |= storage.time_restores(method, folder, state)
            if turn:  # the first turn is a warm-up
                rows.append(row)
    if processes > 1:
        jax.distributed.shutdown()  # together, since the processes are ended one after the other
    return rows


def make_methods(folder: Path, state: dict[str, jax.Array]) -> dict[str, Method]:
    """Make the methods: gather and pickle; Orbax with its defaults; this project, with and without digests."""
    shapes = storage.abstract(state)
    return {
        "gather and pickle": _pickled(folder / "pickle", state, shapes),
        "Orbax": _orbax(folder / "orbax", state, shapes, wait=True),
        "Orbax, asynchronous": _orbax(folder / "orbax_async", state, shapes, wait=False),
        "verified": storage.make_method(folder / "verified", state, shapes),
        "without digests": storage.make_method(folder / "unverified", state, shapes, "none"),
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
    figures = storage.time_save(method, step)
    return figures | {"memory": storage.largest(peak_memory() - before)}


def restart_peak() -> int:
    """Let the kernel count this process' peak memory anew (proc(5)), and return the resident memory in bytes."""
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return peak_memory()


DISK = "folder on the disk to measure (default: the system temporary folder)"
FLAGS = {
    "--gib": flag([0.25, 2.0], "SIZE", "state sizes to save, in GiB"),
    "--processes": flag([1, 2, 4], "N", "numbers of processes to save from"),
    "--folder": {"metavar": "FOLDER", "help": DISK},
}
main = command(run, FLAGS, repeats=5, png="save times against the number of processes")
