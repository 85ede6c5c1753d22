"""Measure cold and warm reads on the storage of the data, and saves and restores on that of the checkpoints."""

import ctypes
import itertools
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import psutil
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from zaya_jax.checkpoint.restore import restore_newest
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import CheckpointConfig, Config
from zaya_jax.config.stages import largest_stage
from zaya_jax.data.prepare.shards import token_dtype
from zaya_jax.errors import InputError, printable
from zaya_jax.lab.measure.network_devices import Traffic
from zaya_jax.lab.measure.timing import elapsed, time_calls
from zaya_jax.lab.result import describe_run, print_tables, rounded
from zaya_jax.lab.result_tables import TABLES
from zaya_jax.run.files import expanded, explained
from zaya_jax.run.host_memory import control_groups

OPERATIONS = 20_000  # pages of a pass of random reads
_SPARE = 3  # free space over the size: a checkpoint, the next one, and some more
PAGE_BYTES = 4096  # read by one operation
_FRAGMENTATION = (1.0, 2.0, 8.0)  # well packed; the limit of well packed; scattered (docs/reference.md §6.3)
BLOCK = 2**22  # bytes of a sequential read
_libc = ctypes.CDLL(None, use_errno=True)
LARGE = 16  # number of large arrays, which share the state's size
_SMALL = 100  # number of small ones of 1 KiB


def measure_storage(config: Config, size: int, threads: Sequence[int], repeats: int) -> dict[str, Any]:
    """Measure the folders of a configuration, print what it means for its training, and return the result, for JSON.

    Reads of a file of `size` bytes are measured in the folder of the first source of `data.sources`, or in
    `data.cache_dir` without sources; saves of a state of as many in `run_dir`. If a folder does not exist, its nearest
    existing parent is used. InputError if a folder cannot be written, or has too little free space.
    """
    sources = [source.path for source in config.data.sources.values()]
    data, run = _existing((sources or [config.data.cache_dir])[0]), _existing(config.run_dir)
    for name, folder in (("data", data), ("checkpoints", run)):
        free, needed = shutil.disk_usage(folder).free, _SPARE * size
        if free < needed:
            problem = f"The folder {folder} for {name} has {free:,} bytes free, but --size {size:,} needs {needed:,}"
            raise InputError(f"{problem}. Choose a smaller --size.")
    print(printable(f"Measuring reads in {data}, and saves in {run}."), flush=True)
    result = describe_run("storage", f"{size:,} bytes", "", ("orbax-checkpoint",))
    with _scratch(data) as reading, _scratch(run) as saving:
        path, traffic = Path(reading) / "pages", Traffic()
        write_file(path, size)
        patterns = [*(("random", count) for count in threads), ("sequential", 1)]
        cases = itertools.product(("cold", "warm"), patterns)
        result["reads"] = [time_reads(path, how, cache, count, OPERATIONS, repeats) for cache, (how, count) in cases]
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
    with explained(f"The folder {folder} cannot be written"):
        return tempfile.TemporaryDirectory(prefix=".zaya_jax_storage_", dir=folder)


def _shortest_steps(config: Config, speed: float) -> list[dict[str, Any]]:
    """Return the shortest step of each phase: with fewer seconds, training would wait for pages.

    The model of ZAYA1's report (docs/reference.md §6.3): one operation per page, of which scattered tokens need more.
    """
    rows, token_bytes = [], token_dtype(config.model.vocab_size).itemsize
    for index, phase in enumerate(config.phases):
        stage, shortest = largest_stage(config, index), {}
        size = {"sequences": stage.sequences, "context": stage.context}
        pages = stage.tokens * token_bytes / PAGE_BYTES
        for fragmentation in _FRAGMENTATION:
            shortest[f"{fragmentation:g}"] = fragmentation * pages / speed
        rows.append({"phase": phase.name, **size, "shortest_step_seconds": shortest})
    return rows


def write_file(path: Path, size: int) -> None:
    """Write `size` random bytes, rounded down to whole pages, and wait until they are durable."""
    random, whole = np.random.default_rng(0), size // PAGE_BYTES * PAGE_BYTES
    with path.open("wb") as file:
        for start in range(0, whole, BLOCK):
            file.write(random.bytes(min(BLOCK, whole - start)))
        file.flush()
        os.fsync(file.fileno())


def time_reads(path: Path, pattern: str, cache: str, threads: int, operations: int, repeats: int) -> dict[str, Any]:
    """Time passes of reads of a file of whole pages, and return what was read and how fast (median), for JSON.

    The pattern is 'random', at most `operations` single pages shared by `threads`, or 'sequential', `BLOCK` bytes at a
    time by one thread. 'cold' drops the file from the page cache before each pass; 'warm' reads it once before the
    first. `cached` is the fraction in the page cache before a pass: the maximum if cold, the minimum if warm.
    """
    size, cached = path.stat().st_size, list[float]()
    if pattern == "random":
        order = np.random.default_rng(0).permutation(size // PAGE_BYTES)[:operations].astype(np.int64) * PAGE_BYTES
        parts, length, advice = np.array_split(order, threads), PAGE_BYTES, os.POSIX_FADV_RANDOM
    else:
        parts, length, advice = [np.arange(0, size, BLOCK)], BLOCK, os.POSIX_FADV_SEQUENTIAL

    def before() -> None:
        if cache == "cold":
            drop_cached(path)
        cached.append(cached_fraction(path))

    with path.open("rb", buffering=0) as file, ThreadPoolExecutor(len(parts)) as pool:
        os.posix_fadvise(file.fileno(), 0, 0, advice)  # without it, a page's neighbours would be read, too

        def read(offsets: np.ndarray) -> None:
            buffer = bytearray(length)
            for offset in offsets.tolist():
                if not os.preadv(file.fileno(), [buffer], offset):
                    raise RuntimeError(f"No bytes at offset {offset} of the file.")

        if cache == "warm":
            while file.read(BLOCK):
                pass
        median, seconds = time_calls(lambda: list(pool.map(read, parts)), repeats, 0, before)
    count = sum(map(len, parts))
    moved, worst = min(count * length, size), max if cache == "cold" else min
    row = {"pattern": pattern, "cache": cache, "threads": len(parts), "operations": count, "bytes": moved}
    row |= {"cached": worst(cached), "seconds": rounded(seconds)}
    return row | {"operations_per_second": count / median, "bytes_per_second": moved / median}


def drop_cached(path: Path) -> None:
    """Drop a file, or the files of a folder, from the page cache; dirty pages stay."""
    for file in path.rglob("*") if path.is_dir() else [path]:
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cached_fraction(path: Path) -> float:
    """Return the fraction of a file's pages that are in the page cache (mincore(2)); OSError if it fails."""
    mapped = np.memmap(path, np.uint8, "r")
    pages = np.zeros(-(-mapped.nbytes // mmap.PAGESIZE), np.uint8)
    start, vector = (ctypes.c_void_p(array.ctypes.data) for array in (mapped, pages))
    if _libc.mincore(start, ctypes.c_size_t(mapped.nbytes), vector):
        raise OSError(ctypes.get_errno(), f"mincore of {path} failed")
    return float((pages & 1).mean())


class Method(NamedTuple):
    """A way to save: `start` blocks the step loop, and `finish` waits until the files are durable."""

    start: Callable[[int], None]
    finish: Callable[[], None]
    restore: Callable[[], Any]


def time_saves(folder: Path, size: int, repeats: int) -> dict[str, list[float]]:
    """Save and restore arrays of `size` bytes in all, on the first device; a first, untimed repeat starts Orbax.

    Returns seconds: `stall` of training, `commit` until it is durable, `cold` and `warm` to restore and verify it.
    """
    state = make_state(size, _SMALL, jax.devices()[:1])
    method = make_method(folder, state, abstract(state))
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

    return Method(start, finish, restore)


def time_save(method: Method, step: int) -> dict[str, float]:
    """Save once; return `stall` and `commit` (until durable), s: the maximum over processes."""
    stall = elapsed(lambda: method.start(step))
    commit = stall + elapsed(method.finish)
    return {"stall": largest(stall), "commit": largest(commit)}


def time_restores(method: Method, folder: Path, state: dict[str, jax.Array]) -> dict[str, float]:
    """Return the seconds to restore from a cold and a warm page cache; RuntimeError for wrong values."""
    seconds, arrays = dict[str, float](), dict[str, jax.Array]()

    def restore() -> None:
        arrays.update(jax.block_until_ready(method.restore()))

    for kind in ("cold", "warm"):
        if kind == "cold":
            drop_cached(folder)
        multihost_utils.sync_global_devices("restore")
        seconds[f"restore_{kind}"] = largest(elapsed(restore))
        for name, x in state.items():
            if not _equal(x, arrays[name]):
                raise RuntimeError(f"{name} was restored from {folder} with wrong values.")
        arrays.clear()
    return seconds


_equal: Callable[[jax.Array, jax.Array], jax.Array] = jax.jit(jnp.array_equal)  # compares on the devices


def largest(value: float) -> float:
    """Return the maximum over all processes."""
    return float(np.max(multihost_utils.process_allgather(np.float32(value))))
