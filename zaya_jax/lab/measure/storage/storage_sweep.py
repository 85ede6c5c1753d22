"""Measure reads on the folder of the data and saves on that of the checkpoints; print and return."""

import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from zaya_jax.config import Config
from zaya_jax.config.stages import largest_stage
from zaya_jax.data.io_estimate import PAGE_BYTES, io_estimate
from zaya_jax.data.shards import token_dtype
from zaya_jax.errors import InputError, printable
from zaya_jax.lab.measure.network_devices import Traffic
from zaya_jax.lab.measure.storage.reads import time_reads, write_file
from zaya_jax.lab.measure.storage.saves import time_saves
from zaya_jax.lab.report.tables import TABLES
from zaya_jax.lab.result import describe_run, print_tables, rounded
from zaya_jax.run.files import expanded
from zaya_jax.run.host_memory import control_groups

OPERATIONS = 20_000  # pages of a pass of random reads
_SPARE = 3  # free space over the size: a checkpoint, the next one, and some more
_FRAGMENTATION = (1.0, 2.0, 8.0)  # well packed; the limit of well packed; scattered (docs/reference.md §6.3)


def measure_storage(config: Config, size: int, threads: Sequence[int], repeats: int) -> dict[str, Any]:
    """Measure the folders of a configuration, and print what it means for its training.

    Reads are measured in the folder of the first source of `data.sources`, or in `data.cache_dir` without sources;
    saves in `run_dir`. If a folder does not exist, its nearest existing parent is used.

    Args:
      config: gives the folders and the batches.
      size: bytes of the file that is read, and of the state that is saved.
      threads: numbers of concurrent threads for random reads.
      repeats: number of passes.

    Returns:
      The result, for JSON: `reads` and `saves`, bytes by network interface as `traffic`, and per phase the shortest
      step that the storage can feed.

    Raises:
      InputError: a folder cannot be written, or has too little free space.
    """
    sources = [source.path for source in config.data.sources.values()]
    data, run = _existing((sources or [config.data.cache_dir])[0]), _existing(config.run_dir)
    for name, folder in (("data", data), ("checkpoints", run)):
        free, needed = shutil.disk_usage(folder).free, _SPARE * size
        if free < needed:
            what = f"The folder {folder} for {name} has {free:,} bytes free, but --size {size:,} needs {needed:,}"
            raise InputError(f"{what}. Choose a smaller --size.")
    print(printable(f"Measuring reads in {data}, and saves in {run}."), flush=True)
    result = describe_run("storage", f"{size:,} bytes", "", ("orbax-checkpoint",))
    with _scratch(data) as reading, _scratch(run) as saving:
        path, traffic = Path(reading) / "pages", Traffic()
        write_file(path, size)
        patterns = [*(("random", count) for count in threads), ("sequential", 1)]
        result["reads"] = [
            time_reads(path, pattern, cache, count, OPERATIONS, repeats)
            for cache in ("cold", "warm")
            for pattern, count in patterns
        ]
        path.unlink()
        saves = time_saves(Path(saving), size, repeats)
        result["saves"] = {name: rounded(seconds) for name, seconds in saves.items()}
    result["traffic"] = traffic.bytes()
    cold = [row for row in result["reads"] if (row["pattern"], row["cache"]) == ("random", "cold")]
    result["phases"] = _shortest_steps(config, max(row["operations_per_second"] for row in cold))
    result["available_memory"] = min([psutil.virtual_memory().available, *control_groups()])
    print_tables(TABLES["storage"](result))
    return result


def _existing(name: str) -> Path:
    path = expanded(name).resolve()
    return next(parent for parent in (path, *path.parents) if parent.is_dir())


def _scratch(folder: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        return tempfile.TemporaryDirectory(prefix=".zaya_jax_storage_", dir=folder)
    except OSError as error:
        raise InputError(f"The folder {folder} cannot be written: {error.strerror}.") from error


def _shortest_steps(config: Config, speed: float) -> list[dict[str, Any]]:
    """Return the shortest step of each phase: with fewer seconds, training would wait for pages."""
    rows, token_bytes = [], token_dtype(config.model.vocab_size).itemsize
    for index, phase in enumerate(config.phases):
        stage, shortest = largest_stage(config, index), {}
        size = {"sequences": stage.sequences, "context": stage.context}
        for fragmentation in _FRAGMENTATION:
            extra = (fragmentation - 1) * stage.context * token_bytes / PAGE_BYTES
            load = io_estimate(
                **size, token_bytes=token_bytes, extra_pages=extra, step_seconds=1.0, max_operations_per_second=speed
            )
            shortest[f"{fragmentation:g}"] = load.shortest_step_seconds
        rows.append({"phase": phase.name, **size, "shortest_step_seconds": shortest})
    return rows
