"""Times of steps, of decoding and of kernels on the device, beside what was predicted for it."""

import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.decode import NEW, PROMPT, our_decode
from benchmarks.gpu_report.runs import small_config
from benchmarks.kernels import SIDES, bench_kernels, short
from benchmarks.step import default_config
from benchmarks.train_step import EIGHT_B, Layout, time_train_step
from zaya_jax.config import load_config
from zaya_jax.config.shipped import shipped
from zaya_jax.hardware.data_sheets import find_hardware
from zaya_jax.lab.measure.step_parts import break_down_generation
from zaya_jax.lab.measure.timing import time_calls
from zaya_jax.lab.measure.tune import DECIDING, totals, tune
from zaya_jax.lab.predict.step_time import Work
from zaya_jax.ops.kernel_table import REFERENCE, own_table
from zaya_jax.run.files import json_text, read_json, write_atomically
from zaya_jax.run.writing import make_folder

# By name: value (None if it was not measured), unit and, if there is one, the prediction.
Figures = dict[str, list[Any]]
_GB, _MS = 1e9, 1e-3


def measure_step(small: bool, layout: Layout, deterministic: bool = False) -> dict[str, Any]:
    """Time and trace the step of configs/bench_8b.yaml, or of a small model; see `time_train_step`."""
    config = small_config() if small else load_config(EIGHT_B, [f"train.deterministic={str(deterministic).lower()}"])
    result = time_train_step(config, layout, 2 if small else 5)
    return result | {"figures": step_figures(result, jax.devices()[0].device_kind)}


def step_figures(part: Mapping[str, Any], kind: str) -> Figures:
    """Return time, speed, memory and parts of a step, beside those predicted from the compiled program."""
    predicted = None if part["predicted"] is None else part["predicted"]["seconds"]
    measured, hardware = statistics.median(part["step_seconds"]), find_hardware(kind)

    def per_second(work: float, unit: str) -> list[Any]:
        return [short(work / measured), unit, predicted and short(work / predicted)]

    peak = short(part["peak_bytes"] / _GB) if part["peak_bytes_by"] == "the device" else None
    figures: Figures = {
        "step": [short(measured), "s", predicted and short(predicted)],
        "speed": per_second(part["tokens"], "tokens/s"),
        "peak memory": [peak, "GB", short(part["compiled"]["memory"]["peak"] / _GB)],
    }
    if hardware is not None:
        figures["MFU"] = per_second(100 * part["flops"] / part["devices"] / hardware.peak, "%")
    for name, row in part.get("parts", {}).items():
        times = row["measured"], row["predicted"]
        figures[f"part {name}"] = [short(times[0] / _MS), "ms", times[1] and short(times[1] / _MS)]
    return figures


def measure_kernels(small: bool) -> dict[str, Any]:
    """Time all kernels with `bench_kernels`, or one that is emulated at a `small` size; returns its result for JSON."""
    result = bench_kernels(("residual_norm",) if small else (), 2 if small else 5, None)
    kept = {key: result[key] for key in ("emulated", "rooflines", "results", "failed") if key in result}
    return kept | {"figures": kernel_figures(result, result["hardware"]["device"])}


def kernel_figures(part: Mapping[str, Any], kind: str) -> Figures:
    """Return the times of kernels, beside those predicted from the data sheet, and their relative speeds."""
    hardware, figures = find_hardware(kind), Figures()
    for name, row in part["results"].items():
        if (seconds := row["median_seconds"].get("kernel")) is None:
            continue
        work = Work(name, row["bytes"], row["flops"], "kernel")
        figures[name] = [short(seconds / _MS), "ms", hardware and short(work.seconds(hardware) / _MS)]
        for peer, title in SIDES.items():
            if row.get(peer) is not None:
                figures[f"{name} against {title}"] = [row[peer], "×"]
    return figures


def measure_tuning(small: bool, seconds: float) -> dict[str, Any]:
    """Time the implementations of all operations, or of one at a small size; after `seconds` no further one."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder  # this process' table is the report's, not the user's own
        table = tune(None, [], 1 if small else 3, seconds, ("residual_norm",) if small else DECIDING)
    figures: Figures = {}
    for name, row in table["operations"].items():
        for size in row["sizes"]:
            by_variant = totals(size)
            # The first kernel to be timed is the default, with its default tiles; it may have failed.
            default = next((variant for variant in size["seconds"] if variant != REFERENCE), REFERENCE)
            fastest = min(by_variant, key=by_variant.__getitem__, default=REFERENCE)
            for what, variant in (("fastest", fastest), ("default", default), ("XLA", REFERENCE)):
                if variant in by_variant:  # XLA's may have failed, too
                    figures[f"{name}, {size['rows']:,} rows: {what}"] = [round(1e3 * by_variant[variant], 4), "ms"]
    return {"table": table, "figures": figures}


def measure_tuned_step(small: bool, recording: Path) -> dict[str, Any]:
    """Time and trace a step with the table of `measure_tuning`, whose recording is a file; see `measure_step`."""
    table = read_json(recording).get("table") if recording.exists() else None
    if table is None:
        return {"skipped": "There is no table of measured kernels: run the part `tune` first."}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        path = own_table(jax.devices()[0].device_kind)
        make_folder(path.parent)
        write_atomically(path, json_text(table))
        return measure_step(small, "data")


def measure_decode(small: bool) -> dict[str, Any]:
    """Trace decode steps of the 8B's layers in bf16, or of the tiny model, and time the prompts of `decode`."""
    prompt, new, repeats, rows = (32, 8, 1, 1) if small else (PROMPT, NEW, 3, 8)
    dtype, batches, config = "float32" if small else "bfloat16", (1,) if small else (1, 64), default_config().model
    prompts = np.random.default_rng(0).integers(0, config.vocab_size, (rows, prompt))
    figures: Figures = {}
    for count in (1, new):
        seconds = time_calls(our_decode(config, dtype, prompts, count), repeats).median
        figures[f"{rows} × {prompt} tokens, then {count}"] = [round(1e3 * seconds, 2), "ms"]
    result: dict[str, Any] = {"batches": {}, "figures": figures, "configurations": {}}
    for batch in batches:
        traced = break_down_generation(str(shipped("tiny.yaml") if small else EIGHT_B), [], "decode", batch, prompt, 1)
        result["configurations"][f"decode step, batch {batch}"] = traced["ran"]
        result["batches"][str(batch)] = {key: traced[key] for key in ("steps", "seconds", "untraced_seconds", "parts")}
        figures[f"decode step, batch {batch}"] = [round(1e3 * traced["untraced_seconds"], 3), "ms"]
    return result
