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
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.benchmark_command import run_benchmark
from benchmarks.saving import Job, measure
from zaya_jax.config.checks import require
from zaya_jax.lab.result import describe_run
from zaya_jax.lab.result_plots import draw_lines
from zaya_jax.lab.subprocesses import restored_environment, run_in_subprocess
from zaya_jax.run.parser import Parser
from zaya_jax.run.reserved_port import reserved_port

_FIGURES = ("stall", "commit", "restore_cold", "restore_warm", "verify_cold", "verify_warm", "step_inflation", "memory")
_DRAWS = 2000  # of the bootstrap
PEER, OURS, BARE = "gather and pickle", "verified", "without digests"
_NAMES = {OURS: "zaya_jax", BARE: "zaya_jax, no checksums"}  # in the printed table


def bench_checkpoint(
    sizes: Sequence[float], processes: Sequence[int], repeats: int, png: str | None, folder: str | None
) -> dict[str, Any]:
    """Measure each size with each number of processes, and print a table.

    Every method makes its files durable (fsync, rename, fsync of the folder); restored arrays are compared bitwise.

    Args:
      sizes: sizes of the state, in GiB.
      processes: numbers of processes, each with one CPU device.
      repeats: number of timed saves of each method, in turn, after one warm-up save.
      png: file for a plot of times against the number of processes, for the largest state; None for no plot.
      folder: folder on the disk to measure; None for the system temporary folder.

    Raises:
      InputError: `folder` is not a folder.
    """
    require(folder is None or Path(folder).is_dir(), "--folder", folder, "an existing folder")
    result = describe_run(
        "seconds that a save blocks the step loop, until the checkpoint is durable, and to restore it",
        f"states of {', '.join(f'{size:g}' for size in sizes)} GiB, 16 large arrays and 1,000 of 1 KiB",
        "process_allgather to process 0, which pickles",
        ("orbax-checkpoint", "tensorstore"),
    )
    result["results"] = []
    with tempfile.TemporaryDirectory(prefix="bench_checkpoint_", dir=folder) as name:
        result["hardware"]["disk"] = describe_disk(Path(name))
        for size, count in itertools.product(sizes, processes):
            rows = run_job(Path(name), count, round(size * 2**30), repeats)
            result["results"].append(summary(size, count, rows))
            print_table(result["results"][-1])
    if png:
        _draw(Path(png), max(sizes), result["results"])
    return result


def describe_disk(folder: Path) -> dict[str, Any]:
    """Describe a disk: file system, free space, and the speed of writing one durable file of 256 MiB."""
    block = os.urandom(2**20)
    start = time.perf_counter()
    with (folder / "speed").open("wb") as file:
        for _ in range(256):
            file.write(block)
        file.flush()
        os.fdatasync(file.fileno())
    seconds = time.perf_counter() - start
    (folder / "speed").unlink()
    mounts = [line.split()[1:3] for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    here = [(len(where), kind) for where, kind in mounts if folder.resolve().is_relative_to(where)]
    return {"file_system": max(here)[1], "mb_per_second": round(256 * 1.048576 / seconds),
            "free_bytes": shutil.disk_usage(folder).free}  # fmt: skip


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
    table = {way: {key: {"median": statistics.median(values), "least": min(values), "most": max(values)}
                   for key, values in figures.items()} for way, figures in ways.items()}  # fmt: skip

    def ratio(key: str, way: str, other: str) -> float:
        return table[way][key]["median"] / table[other][key]["median"]

    return {
        "gib": size, "processes": processes, "ways": table,
        "stall_ratio": ratio("stall", PEER, OURS), "stall_interval": interval(ways[PEER]["stall"], ways[OURS]["stall"]),
        "commit_ratio": ratio("commit", PEER, OURS),
        "commit_interval": interval(ways[PEER]["commit"], ways[OURS]["commit"]),
        "digest_share": ratio("commit", OURS, BARE) - 1,
        "restore_ratio": ratio("restore_warm", PEER, OURS),
    }  # fmt: skip


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
    print(f"{job['gib']:g} GiB, {count} process{'es' if count > 1 else ''}:\n  {PEER} blocks "
          f"training {job['stall_ratio']:.1f}× as long as zaya_jax (95 % interval {low:.1f} to {high:.1f})\n"
          f"  compared with it, zaya_jax makes the checkpoint durable {job['commit_ratio']:.2f}× as fast, and "
          f"restores it with checksums {job['restore_ratio']:.2f}× as fast\n"
          f"  checksums add {100 * job['digest_share']:.1f} % to the time until the checkpoint is durable")  # fmt: skip
    print(f"  {'medians, in seconds':<24}{'training':>10}{'durable':>9}{'restore':>10}{'restore':>10}{'peak':>10}"
          f"{'step time':>15}\n  {'':<24}{'waits':>10}{'after':>9}{'from disk':>10}{'cached':>10}{'memory':>10}"
          f"{'during a save':>15}")  # fmt: skip
    for way, figures in job["ways"].items():
        seconds = "".join(f"{figures[key]['median']:>{width}.3f}" for key, width in
                          (("stall", 10), ("commit", 9), ("restore_cold", 10), ("restore_warm", 10)))  # fmt: skip
        steps = f"{figures['step_inflation']['median']:>14.2f}×" if "step_inflation" in figures else ""
        print(f"  {_NAMES.get(way, way):<24}{seconds}{figures['memory']['median'] / 2**20:>6.0f} MiB{steps}")


def _draw(path: Path, size: float, results: list[dict[str, Any]]) -> None:
    jobs = [job for job in results if job["gib"] == size]
    lines = {f"{way}: {what}": ([job["processes"] for job in jobs],
                               [job["ways"][way][key]["median"] for job in jobs])
             for key, what in (("stall", "training waits"), ("commit", "durable after"))
             for way in jobs[0]["ways"]}  # fmt: skip
    draw_lines(path, lines, title=f"Saving {size:g} GiB: how long training waits, and when the checkpoint is durable",
               x="number of processes", y="time (s)", logarithmic="y")  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run this benchmark; see `benchmark_command.run_benchmark`."""
    return run_benchmark(_run, arguments, _add, repeats=5, png="save times against the number of processes")


def _add(parser: Parser) -> None:
    parser.add_argument("--gib", type=float, nargs="+", default=[0.25, 2.0], metavar="SIZE",
                        help="state sizes to save, in GiB (default: 0.25 2)")  # fmt: skip
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4], metavar="N",
                        help="numbers of processes to save from (default: 1 2 4)")  # fmt: skip
    parser.add_argument("--folder", metavar="FOLDER",
                        help="folder on the disk to measure (default: the system temporary folder)")  # fmt: skip


def _run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Time saving and restoring against Orbax and gather-and-pickle.

    Measures how long a save blocks training, when the checkpoint is durable, and how long it takes to restore, with
    several processes on one disk.

    checkpoint --gib 2 --processes 1 4 --png saving.png
    """
    for name, values in (("--gib", parsed.gib), ("--processes", parsed.processes)):
        require(min(values) > 0, name, min(values), "above 0")
    return bench_checkpoint(parsed.gib, parsed.processes, parsed.repeats, parsed.png, parsed.folder)
