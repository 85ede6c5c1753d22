"""Save and restore the whole state of a training run on one device: how long training waits, and what memory it takes.

A process that trains layers of ZAYA1-8B saves and is killed; another one resumes, from the page cache. Then one process
saves a smaller state with each method of the benchmark `checkpoint`, in turn, and restores it from the disk.
"""

import dataclasses
import functools
import math
import shutil
import signal
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks.benchmark_command import training_process
from benchmarks.checkpoint import describe_disk, make_methods, timed_save
from benchmarks.data import write_drawn
from benchmarks.gpu_report.observed_training import SAVED
from benchmarks.gpu_report.runs import CONTEXT, SMALL_TEXT, TINY, folder_of_runs, make_config
from benchmarks.gpu_report.speed import Figures
from benchmarks.kernels import short
from benchmarks.train_step import EIGHT_B, compile_fitting, deepest
from zaya_jax.config import Config, from_dict, load_config, to_dict, to_yaml
from zaya_jax.data.loading.text_corpus import find_corpus
from zaya_jax.data.tokenizer import train_tokenizer
from zaya_jax.errors import InputError, RunStopped
from zaya_jax.hardware.data_sheets import find_hardware
from zaya_jax.lab.measure.storage import make_state, time_restores
from zaya_jax.lab.predict.dry_run.estimate import simulated_programs
from zaya_jax.lab.subprocesses import run_in_subprocess
from zaya_jax.parallel.placement import device_bytes
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.files import read_json
from zaya_jax.run.host_memory import free_memory
from zaya_jax.train.memory import available_memory, gigabytes

METHODS = ("verified", "Orbax", "Orbax, asynchronous", "gather and pickle")  # of `checkpoint.make_methods`
_TITLES = {"verified": "zaya_jax", "gather and pickle": "gather"}
_SIZE, _SMALL_SIZE, _WARM_UP = 8 * 10**9, 64 * 2**20, 2**24  # bytes of the state that all methods save
_TURNS = 3  # at most, of each method
_STARTS, _COMPARING = 60.0, 25.0  # seconds on a GPU for three starts, one of which compiles, and to compare methods
_WARM = 1.5  # time to save and to restore from the page cache, over the time to write
_SPARE = 1.1  # free disk space over the bytes of a state
_HOST_COPIES = 1.5  # host memory for a save, over the bytes of a state
_ROUNDING = 1.001  # peaks differ by what the allocator rounds up
_GB = 1e9
_SECONDS = {"stall": "stall", "commit": "until durable", "restore": "restore"}


class Room(NamedTuple):
    """The room for a state, in bytes."""

    disk: float
    host: float
    time: float  # what the disk can write and read in the remaining time

    @property
    def bound(self) -> str:
        """The name of the least of them."""
        return ("free disk space", "free host memory", "the time to save and restore")[self.index(min(self))]


def measure_state(small: bool, seconds: float = 120.0) -> dict[str, Any]:
    """Measure saves and restores of a run and of each method, on a CPU of a tiny model and state (`small`).

    On a GPU the states are reduced to what can be saved in about so many seconds. Returns the `training`, the `methods`
    and the `disk`, `figures`, and `notes`, sentences on what was reduced. `failed`: a sentence, if something is wrong.
    """
    deadline = math.inf if small else time.monotonic() + seconds
    result: dict[str, Any] = {"figures": {}, "notes": []}
    problems: list[str] = []
    with folder_of_runs("state") as folder:
        result["disk"] = disk = describe_disk(folder)
        for name, measure in {"training": _measure_training, "methods": _measure_methods}.items():
            try:
                part = measure(folder, small, disk["mb_per_second"] * 1e6, deadline)
            except (InputError, RunStopped, RuntimeError) as error:
                problems.append(f"{name.capitalize()}: {error}")
                continue
            result["figures"] |= part.pop("figures")
            result["notes"] += part.pop("notes")
            problems += part.pop("problems")
            result[name] = part
    return result | ({"failed": " ".join(problems)} if problems else {})


# --- a run that is killed and resumed --------------------------------------------------------------------------


def _measure_training(folder: Path, small: bool, speed: float, deadline: float) -> dict[str, Any]:
    config, started = _make_config(folder, small), time.monotonic()
    seconds = max(deadline - started - _STARTS - _COMPARING, 1.0)
    room = Room(shutil.disk_usage(folder).free / _SPARE, free_memory() / _HOST_COPIES, speed * seconds / _WARM)
    with run_in_subprocess(functools.partial, fit, config, room) as ask:
        fitted = ask()
    path = folder / "run.yaml"
    path.write_text(fitted.pop("config"), encoding="utf-8")
    first, second = (_train(folder, path, name) for name in ("first", "second"))
    return describe_training(first, second, fitted)


def _make_config(folder: Path, small: bool) -> Config:
    """Write random documents, and make a run that trains on them with few tokens a step, and saves each step."""
    tiny = make_config(TINY, CONTEXT, 4, 100, 100, "float32", SMALL_TEXT)
    tokenizer, drawn, context = folder / "tokenizer.json", folder / "drawn", CONTEXT if small else 1024
    train_tokenizer(find_corpus(tiny.data).texts("train"), 300).save(tokenizer)
    write_drawn(drawn, tokenizer, 100 * 4 * context, 1)
    phase = {"name": "step", "tokens": 100 * 4 * context, "batch": {"tokens": 4 * context, "micro_batch": 2}}
    phase |= {"context": context, "schedule": {"shape": "constant"}, "rope_base": 1.0e4, "remat": "dots"}
    changes = {
        "phases": [phase],
        "run_dir": str(folder / "run"),
        "data": {"sources": {"drawn": {"path": str(drawn)}}, "context": context, "cache_dir": str(folder / "cache")},
        "evaluation": {"every": 10**6, "batches": 1, "batch_size": 1},
        "checkpoint": {"every": SAVED, "keep": 1},
    }
    return from_dict(to_dict(tiny if small else load_config(EIGHT_B)) | changes)


def fit(config: Config, room: Room) -> dict[str, Any]:
    """Compile and describe the deepest step whose state has `room` and which fits a device; InputError if none does."""

    def size(config: Config) -> int:
        return device_bytes(simulated_programs(config, 1)[0].abstract_state)

    if (stored := deepest(config, min(room), size)) is None:
        shallow = dataclasses.replace(config.model, num_layers=len(config.model.period))
        needed, allowed = size(dataclasses.replace(config, model=shallow)), gigabytes(int(min(room)))
        state = f"A state of {shallow.num_layers} layers has {gigabytes(needed)}"
        raise InputError(f"{state}, but {room.bound} allows {allowed}.")
    kind = jax.devices()[0].device_kind
    fitting = compile_fitting(stored, 1, find_hardware(kind), available_memory())
    layers, wanted = fitting.config.model.num_layers, config.model.num_layers
    limit = room.bound if layers == stored.model.num_layers else "device memory"
    reduced = f"The run had {layers} of {wanted} layers: {limit} does not suffice for more."
    return {
        "config": to_yaml(fitting.config),
        "layers": layers,
        "state_bytes": size(fitting.config),
        "compile_seconds": fitting.seconds,
        "reduced": reduced if layers < wanted else None,
    }


def _train(folder: Path, config: Path, name: str) -> dict[str, Any]:
    """Train in a new process, which kills itself; return its notes, and when it `started`."""
    output, checkpoint = folder / f"{name}.json", folder / "run" / CHECKPOINTS / str(SAVED)
    program = ("-m", "benchmarks.gpu_report.observed_training", str(output), str(checkpoint), "--")
    started = time.monotonic()
    with training_process(config, program=program, ends=(-signal.SIGKILL,)) as process:
        process.wait()
        if not output.exists():  # killed by another, before its notes
            raise RunStopped(f"The process of {name} ended with status {process.returncode} before it noted anything.")
    return {"started": started, **read_json(output)}


def describe_training(first: Mapping[str, Any], second: Mapping[str, Any], fitted: Mapping[str, Any]) -> dict[str, Any]:
    """Describe what the process that saved and the one that resumed have noted; they trained what `fit` returned."""
    seconds = {
        "training waits for the save": first["training_continued"] - first["step_1"],
        "until durable": first.get("committed", float("nan")) - first["step_1"],
        "step beside the save": first["step_2"] - first["training_continued"],
        "restore": second["restored"] - second["restore_started"],
        "start to first resumed step": second["step_2"] - second["started"],
    }
    most, resuming = first["device_peak"], second["device_peak"]
    peaks = {
        "device peak, training": most,
        "device peak, resuming": resuming,
        "device peak after restoring": second["restored_device_peak"],
        "host peak, training": first["host_peak"],
        "host peak, resuming": second["host_peak"],
    }
    figures: dict[str, Any] = {name: [short(value), "s"] for name, value in seconds.items()}
    figures |= {name: [short(value / _GB), "GB"] for name, value in peaks.items() if value is not None}
    figures["state"] = [short(fitted["state_bytes"] / _GB), "GB"]
    same = [first[key] for key in ("loss", "grad_norm")] == [second[key] for key in ("loss", "grad_norm")]
    figures["resumed step bitwise the same"] = [int(same), ""]
    problems, notes = [], [fitted["reduced"]] if fitted["reduced"] else []
    if "committed" not in first:
        del figures["until durable"]
        problems.append("The checkpoint was not saved.")
    if "step_1" in second:
        problems.append("The second process started over, and did not resume.")
    if most is None or resuming is None:
        notes.append("The device does not count its peak memory, so training and resuming were not compared.")
    elif resuming > _ROUNDING * most:
        more = f"{gigabytes(resuming)} of device memory, more than the {gigabytes(most)} of training"
        problems.append(f"Resuming takes {more}.")
    return {**fitted, "bytes": peaks, "figures": figures, "notes": notes, "problems": problems}


# --- methods on the same device --------------------------------------------------------------------------------


def _measure_methods(folder: Path, small: bool, speed: float, deadline: float) -> dict[str, Any]:
    wanted = _SMALL_SIZE if small else _SIZE
    shutil.rmtree(folder / "run", ignore_errors=True)
    disk, count = shutil.disk_usage(folder).free / _SPARE, len(METHODS)
    seconds = max(deadline - time.monotonic() - _COMPARING, 1.0)
    room = Room(disk / (count + 1), free_memory() / 4, speed * seconds / 2 / count)
    size = int(min(wanted, *room))
    figures: Figures = {}
    if size < min(wanted, _SMALL_SIZE):
        note = f"The methods were not compared: {room.bound} allows only {gigabytes(size)}."
        return {"figures": figures, "notes": [note], "problems": []}
    with run_in_subprocess(functools.partial, compare_methods, folder, size, deadline) as ask:
        rows = ask()
    for method, row in rows.items():
        title, median = _TITLES.get(method, method), {key: statistics.median(values) for key, values in row.items()}
        figures |= {f"{title}: {name}": [short(median[key]), "s"] for key, name in _SECONDS.items()}
        figures[f"{title}: host memory of a save"] = [short(median["memory"] / _GB), "GB"]
    saved = f"The methods saved {gigabytes(size)} in place of {gigabytes(wanted)}, because of {room.bound}."
    notes = [] if size == wanted else [saved]
    return {"bytes": size, "rows": rows, "figures": figures, "notes": notes, "problems": []}


def compare_methods(folder: Path, size: int, deadline: float) -> dict[str, dict[str, list[float]]]:
    """Save and restore with each of `METHODS` in turn, after a warm-up with a small state, on the first device.

    No turn starts after the `deadline`. Returns for each method the figures of `checkpoint.timed_save` and the seconds
    to `restore` from the disk, by turn; RuntimeError if a restored array differs.
    """
    rows: dict[str, dict[str, list[float]]] = {}
    for title, count, turns in (("warm-up", _WARM_UP, 1), ("measured", size, _TURNS)):
        state = make_state(count, 100, jax.devices()[:1])
        work = folder / title
        methods = {each: method for each, method in make_methods(work, state).items() if each in METHODS}
        rows = {each: {"stall": [], "commit": [], "memory": [], "restore": []} for each in METHODS}
        for turn in range(turns):
            start = time.monotonic()
            for each in METHODS:
                state.update(jax.block_until_ready(_copied(state)))  # as jax keeps the host's copy of an array
                for key, value in timed_save(methods[each], turn).items():
                    rows[each][key].append(value)
            for each in METHODS:
                restored = time_restores(methods[each], work, state, ("cold",))
                rows[each]["restore"].append(restored["restore_cold"])
            if time.monotonic() + (time.monotonic() - start) > deadline:
                break
        shutil.rmtree(work)
    return rows


_copied: Callable[[dict[str, jax.Array]], dict[str, jax.Array]] = jax.jit(lambda state: jax.tree.map(jnp.copy, state))
