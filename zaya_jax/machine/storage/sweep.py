"""Measure reads on the folder of the data and saves on that of the checkpoints; print and return."""

import shutil
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from zaya_jax.config import Config
from zaya_jax.config.stages import stages
from zaya_jax.data.io_estimate import PAGE_BYTES, io_estimate
from zaya_jax.data.shards import token_dtype
from zaya_jax.errors import InputError
from zaya_jax.machine.result import describe_run, rounded
from zaya_jax.machine.storage.reads import Reading, time_reads, write_file
from zaya_jax.machine.storage.saves import Saving, time_saves

OPERATIONS = 20_000  # pages of a pass of random reads
_SPARE = 3  # free space over the size: a checkpoint, the next one, and some more
_FRAGMENTATION = (1.0, 2.0, 8.0)  # well packed; the limit of well packed; scattered (docs/reference.md §6.3)


def measure_storage(config: Config, size: int, threads: Sequence[int], repeats: int) -> dict[str, Any]:
    """Measure the folders of a configuration, and print what it means for its training.

    Args:
      config: gives `data.cache_dir` and `run_dir`, whose nearest existing parents are measured, and the batches.
      size: bytes of the file that is read, and of the state that is saved.
      threads: numbers of threads that read random pages at the same time.
      repeats: number of passes.

    Returns:
      The result, for JSON: `reads` and `saves`, and per phase the shortest step that the storage can feed.

    Raises:
      InputError: a folder cannot be written, or has too little free space.
    """
    folders = {"data": _existing(config.data.cache_dir), "checkpoints": _existing(config.run_dir)}
    for name, folder in folders.items():
        if (free := shutil.disk_usage(folder).free) < _SPARE * size:
            raise InputError(f"The folder {folder} for {name} has {free:,} bytes free, but --size {size:,} needs "
                             f"{_SPARE * size:,}. Choose a smaller --size.")  # fmt: skip
    result = describe_run("storage", f"{size:,} bytes", "", ("orbax-checkpoint",))
    with _scratch(folders["data"]) as folder:
        path = Path(folder) / "pages"
        write_file(path, size)
        readings = [
            time_reads(path, pattern, cache, count, OPERATIONS, repeats)
            for cache in ("cold", "warm")
            for pattern, counts in (("random", threads), ("sequential", (1,)))
            for count in counts
        ]
    result["reads"] = [_show_reading(reading, folders["data"]) for reading in readings]
    with _scratch(folders["checkpoints"]) as folder:
        result["saves"] = _show_saving(time_saves(Path(folder), size, repeats), size, folders["checkpoints"])
    speed = max(row["operations_per_second"] for row in result["reads"]
                if (row["pattern"], row["cache"]) == ("random", "cold"))  # fmt: skip
    result["phases"] = _show_phases(config, speed)
    result["available_memory"] = psutil.virtual_memory().available
    print(f"The page cache can hold {result['available_memory'] / 1e9:.1f} GB: prepared data that fits is read from "
          "the storage once.")  # fmt: skip
    return result


def _existing(name: str) -> Path:
    path = Path(name).resolve()
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


def _scratch(folder: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix=".zaya_jax_storage_", dir=folder)
    except OSError as error:
        raise InputError(f"The folder {folder} cannot be written: {error.strerror}.") from error


def _show_reading(reading: Reading, folder: Path) -> dict[str, Any]:
    seconds = statistics.median(reading.seconds)
    row: dict[str, Any] = reading._asdict() | {"seconds": rounded(reading.seconds)}
    row |= {"operations_per_second": reading.operations / seconds, "bytes_per_second": reading.bytes / seconds}
    speed = (f"{row['operations_per_second']:,.0f} pages/s" if reading.pattern == "random"
             else f"{row['bytes_per_second'] / 1e9:.3g} GB/s")  # fmt: skip
    still = f", {reading.cached:.0%} of the file still cached" if reading.cache == "cold" and reading.cached else ""
    print(
        f"{reading.pattern} reads in {folder}, {reading.cache}, {_threads(reading.threads)}: {speed}{still}", flush=True
    )
    return row


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"


def _show_saving(saving: Saving, size: int, folder: Path) -> dict[str, Any]:
    medians = {name: statistics.median(seconds) for name, seconds in saving._asdict().items()}
    print(f"checkpoint of {size / 1e9:.3g} GB in {folder}: training stalls for {medians['stall']:.3g} s; durable after "
          f"{medians['commit']:.3g} s ({size / medians['commit'] / 1e9:.3g} GB/s); restored and verified in "
          f"{medians['cold']:.3g} s cold, {medians['warm']:.3g} s warm", flush=True)  # fmt: skip
    return {name: rounded(seconds) for name, seconds in saving._asdict().items()}


def _show_phases(config: Config, speed: float) -> list[dict[str, Any]]:
    """Print the shortest step of each phase: with fewer seconds, training would wait for pages."""
    rows, token_bytes = [], token_dtype(config.model.vocab_size).itemsize
    for index, phase in enumerate(config.phases):
        last = [stage for stage in stages(config) if stage.phase == index][-1]
        shortest = {}
        for fragmentation in _FRAGMENTATION:
            extra = (fragmentation - 1) * last.context * token_bytes / PAGE_BYTES
            load = io_estimate(sequences=last.sequences, context=last.context, token_bytes=token_bytes,
                               extra_pages=extra, step_seconds=1.0, max_operations_per_second=speed)  # fmt: skip
            shortest[f"{fragmentation:g}"] = load.shortest_step_seconds
        rows.append({"phase": phase.name, "sequences": last.sequences, "context": last.context,
                     "shortest_step_seconds": shortest})  # fmt: skip
        print(f"phase {phase.name}: {last.sequences} sequences of {last.context} tokens at {speed:,.0f} pages/s need a "
              f"step of {shortest['1']:.3g} s if well packed, {shortest['8']:.3g} s if scattered")  # fmt: skip
    return rows
