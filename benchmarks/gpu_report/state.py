"""Save and restore the whole state of a training run on one device: how long training waits, and what memory it takes.

A process that trains layers of ZAYA1-8B saves and is killed; another one resumes, from the page cache.
"""

import dataclasses
import functools
import math
import shutil
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from benchmarks.benchmark_command import training_process
from benchmarks.checkpoint import describe_disk
from benchmarks.data import write_drawn
from benchmarks.gpu_report.observed_training import SAVED
from benchmarks.gpu_report.runs import CONTEXT, SMALL_TEXT, TINY, folder_of_runs, make_config
from benchmarks.kernels import short
from benchmarks.train_step import EIGHT_B, compile_fitting, deepest
from zaya_jax.config import Config, from_dict, load_config, to_dict, to_yaml
from zaya_jax.data.loading.text_corpus import find_corpus
from zaya_jax.data.tokenizer import train_tokenizer
from zaya_jax.errors import InputError, RunStopped
from zaya_jax.hardware.data_sheets import find_hardware
from zaya_jax.lab.predict.dry_run.estimate import simulated_programs
from zaya_jax.lab.subprocesses import run_in_subprocess
from zaya_jax.parallel.placement import device_bytes
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.files import read_json
from zaya_jax.run.host_memory import free_memory
from zaya_jax.train.memory import available_memory, gigabytes

_STARTS = 60.0  # seconds on a GPU for three starts, one of which compiles
_WARM = 1.5  # time to save and to restore from the page cache, over the time to write
_SPARE = 1.1  # free disk space over the bytes of a state
_HOST_COPIES = 1.5  # host memory for a save, over the bytes of a state
_ROUNDING = 1.001  # peaks differ by what the allocator rounds up
_GB = 1e9


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
    """Measure saving and resuming a run, on a CPU of a tiny model (`small`).

    On a GPU the state is reduced to what can be saved in about so many seconds. Returns the `training` and the `disk`,
    `figures`, and `notes`, sentences on what was reduced. `failed`: a sentence, if something is wrong.
    """
    with folder_of_runs("state") as folder:
        disk = describe_disk(folder)
        result: dict[str, Any] = {"figures": {}, "notes": [], "disk": disk}
        try:
            training = _measure_training(folder, small, disk["mb_per_second"] * 1e6, max(seconds - _STARTS, 1.0))
        except (InputError, RunStopped, RuntimeError) as error:
            return result | {"failed": str(error)}
    result |= {key: training.pop(key) for key in ("figures", "notes")}
    problems = " ".join(training.pop("problems"))
    return result | {"training": training} | ({"failed": problems} if problems else {})


def _measure_training(folder: Path, small: bool, speed: float, seconds: float) -> dict[str, Any]:
    config, seconds = _make_config(folder, small), math.inf if small else seconds
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
