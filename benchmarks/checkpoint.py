"""Time saving and restoring in several processes, against gather-and-pickle and against Orbax with its defaults."""

import argparse
import functools
import itertools
import math
import os
import random
import shutil
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.benchmark_command import command, flag
from benchmarks.saving import Job, measure
from zaya_jax.config.checks import counted, require
from zaya_jax.lab.line_plot import draw_lines
from zaya_jax.lab.result import describe_run
from zaya_jax.lab.subprocesses import restored_environment, run_in_subprocess
from zaya_jax.run.reserved_port import reserved_port

_FIGURES = ("stall", "commit", "restore_cold", "restore_warm", "verify_cold", "verify_warm", "step_inflation", "memory")
_DRAWS = 2000  # of the bootstrap
PEER, OURS, BARE = "gather and pickle", "verified", "without digests"
_HEAD = (
    ("medians, in seconds", "training", "durable", "restore", "restore", "peak", "step time"),
    ("", "waits", "after", "from disk", "cached", "memory", "during a save"),
)
_NAMES = {OURS: "zaya_jax", BARE: "zaya_jax, no checksums"}  # in the printed table


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
        jobs = [Job(work, coordinator, processes, process, size, repeats) for process in range(processes)]
        steps = [stack.enter_context(run_in_subprocess(functools.partial, measure, job)) for job in jobs]
        with ThreadPoolExecutor(processes) as pool:  # concurrently, since the processes wait for each other
            rows, *_ = pool.map(lambda step: step(), steps)
    shutil.rmtree(work)
    return rows


def summary(size: float, processes: int, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return median, minimum and maximum of each figure, and ratios of medians to the peer's."""
    ways: dict[str, dict[str, Any]] = {}
    for row in rows:
        for key in _FIGURES:
            if not math.isnan(row.get(key, math.nan)):
                ways.setdefault(row["way"], {}).setdefault(key, []).append(row[key])
    table = {way: {key: _statistics(values) for key, values in figures.items()} for way, figures in ways.items()}

    def ratio(key: str, way: str, other: str) -> float:
        return table[way][key]["median"] / table[other][key]["median"]

    return {
        "gib": size,
        "processes": processes,
        "ways": table,
        "stall_ratio": ratio("stall", PEER, OURS),
        "stall_interval": interval(ways[PEER]["stall"], ways[OURS]["stall"]),
        "commit_ratio": ratio("commit", PEER, OURS),
        "commit_interval": interval(ways[PEER]["commit"], ways[OURS]["commit"]),
        "digest_share": ratio("commit", OURS, BARE) - 1,
        "restore_ratio": ratio("restore_warm", PEER, OURS),
    }


def _statistics(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def interval(numerators: list[float], denominators: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of the ratio of two medians."""
    drawn = random.Random(0)

    def median(values: list[float]) -> float:
        return statistics.median(drawn.choices(values, k=len(values)))

    ratios = sorted(median(numerators) / median(denominators) for _ in range(_DRAWS))
    return ratios[round(0.025 * _DRAWS)], ratios[round(0.975 * _DRAWS) - 1]


def print_table(job: dict[str, Any]) -> None:
    """Print the figures of one job as a table. Memory is the increase during a save in the largest process."""
    (low, high), count = job["stall_interval"], job["processes"]
    durable, restored = f"{job['commit_ratio']:.2f}× as fast", f"{job['restore_ratio']:.2f}× as fast"
    print(f"{job['gib']:g} GiB, {counted(count, 'process', 'es')}:")
    print(f"  {PEER} blocks training {job['stall_ratio']:.1f}× as long as zaya_jax", end=" ")
    print(f"(95 % interval {low:.1f} to {high:.1f})")
    print(f"  compared with it, zaya_jax makes the checkpoint durable {durable}", end=", ")
    print(f"and restores it with checksums {restored}")
    print(f"  checksums add {100 * job['digest_share']:.1f} % to the time until the checkpoint is durable")
    for first, *cells in _HEAD:
        print(f"  {first:<24}" + "".join(f"{cell:>14}" for cell in cells))
    for way, figures in job["ways"].items():
        median = {key: each["median"] for key, each in figures.items()}
        cells = [f"{median[key]:.3f}" for key in ("stall", "commit", "restore_cold", "restore_warm")]
        cells += [f"{median['memory'] / 2**20:.0f} MiB"]
        cells += [f"{median['step_inflation']:.2f}×"] if "step_inflation" in median else []
        print(f"  {_NAMES.get(way, way):<24}" + "".join(f"{cell:>14}" for cell in cells))


def _draw(path: Path, size: float, results: list[dict[str, Any]]) -> None:
    jobs = [job for job in results if job["gib"] == size]
    counts, lines = [job["processes"] for job in jobs], {}
    for key, what in (("stall", "training waits"), ("commit", "durable after")):
        for way in jobs[0]["ways"]:
            lines[f"{way}: {what}"] = counts, [job["ways"][way][key]["median"] for job in jobs]
    title = f"Saving {size:g} GiB: how long training waits, and when the checkpoint is durable"
    draw_lines(path, lines, title=title, x="number of processes", y="time (s)", logarithmic="y")


DISK = "folder on the disk to measure (default: the system temporary folder)"
FLAGS = {
    "--gib": flag([0.25, 2.0], "SIZE", "state sizes to save, in GiB"),
    "--processes": flag([1, 2, 4], "N", "numbers of processes to save from"),
    "--folder": {"metavar": "FOLDER", "help": DISK},
}
main = command(run, FLAGS, repeats=5, png="save times against the number of processes")
