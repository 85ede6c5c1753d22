"""Times of steps, of decoding and of kernels on the device, beside what was predicted for it."""

import os
import statistics
import tempfile
from collections.abc import Iterable, Mapping
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
from zaya_jax.hardware.data_sheets import DATA_SHEET, find_hardware
from zaya_jax.lab.measure.collectives.operations import COLLECTIVES
from zaya_jax.lab.measure.collectives.programs import Case, check_collectives, time_case
from zaya_jax.lab.measure.step_parts import break_down_generation
from zaya_jax.lab.measure.timing import time_calls
from zaya_jax.lab.measure.tune import DECIDING, totals, tune
from zaya_jax.lab.predict.step_time import Work, collective_seconds
from zaya_jax.ops.kernel_table import REFERENCE, own_table
from zaya_jax.parallel.mesh import AXES, make_mesh, nontrivial_axes
from zaya_jax.run.files import json_text, read_object, write_atomically
from zaya_jax.run.writing import make_folder

# By name: value (None if it was not measured), unit and, if there is one, the prediction: one value, or both ends.
Figures = dict[str, list[Any]]
_GB, _MS = 1e9, 1e-3
_COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")  # those of training


def figure(value: float | None, unit: str, ends: Iterable[float] = ()) -> list[Any]:
    """Describe a measured value, and the `ends` of the range that was predicted for it, of which there may be one."""
    return [None if value is None else short(value), unit, *dict.fromkeys(sorted(map(short, ends)))]


def measure_step(small: bool, layout: Layout, deterministic: bool = False) -> dict[str, Any]:
    """Time and trace the step of configs/bench_8b.yaml, or of a small model; see `time_train_step`."""
    config = small_config() if small else load_config(EIGHT_B, [f"train.deterministic={str(deterministic).lower()}"])
    result = time_train_step(config, layout, 2 if small else 5)
    return result | {"figures": step_figures(result, jax.devices()[0].device_kind)}


def step_figures(part: Mapping[str, Any], kind: str) -> Figures:
    """Return time, speed, memory and parts of a step, beside those predicted from the compiled program."""
    predicted = [] if part["predicted"] is None else [part["predicted"][end] for end in ("seconds", "most")]
    measured, hardware = statistics.median(part["step_seconds"]), find_hardware(kind)

    def per_second(work: float, unit: str) -> list[Any]:
        return figure(work / measured, unit, [work / seconds for seconds in predicted])

    peak = part["peak_bytes"] / _GB if part["peak_bytes_by"] == "the device" else None
    figures: Figures = {
        "step": figure(measured, "s", predicted),
        "speed": per_second(part["tokens"], "tokens/s"),
        "peak memory": figure(peak, "GB", [part["compiled"]["memory"]["peak"] / _GB]),
    }
    if hardware is not None:
        figures["MFU"] = per_second(100 * part["flops"] / part["devices"] / hardware.peak, "%")
    for name, row in part.get("parts", {}).items():
        figures[f"part {name}"] = figure(row["measured"] / _MS, "ms", _ends([row]))
    return figures


def _ends(parts: Iterable[Mapping[str, Any]]) -> list[float]:
    """Return both ends of the milliseconds that were predicted for parts together; [] if none was predicted."""
    predicted = [(row["predicted"] / _MS, row["most"] / _MS) for row in parts if row["predicted"] is not None]
    return [sum(ends) for ends in zip(*predicted, strict=True)]


def measure_kernels(small: bool) -> dict[str, Any]:
    """Time all kernels with `bench_kernels`, or one that is emulated at a `small` size; returns its result for JSON."""
    result = bench_kernels(("residual_norm",) if small else (), 2 if small else 5, None)
    kept = {key: result[key] for key in ("emulated", "rooflines", "results", "failed") if key in result}
    return kept | {"figures": kernel_figures(result, result["hardware"]["device"])}


def kernel_figures(part: Mapping[str, Any], kind: str) -> Figures:
    """Return the times of kernels, beside the range predicted from the data sheet, and their relative speeds."""
    hardware, figures = find_hardware(kind), Figures()
    for name, row in part["results"].items():
        if (seconds := row["median_seconds"].get("kernel")) is None:
            continue
        # Some of the FLOPs are not of matrices: the slow end is also that of a kernel that only moves bytes.
        works = [Work(name, row["bytes"], flops, "kernel") for flops in (row["flops"], 0.0)]
        sheets = (hardware, hardware.slowest) if hardware else ()
        ends = [max(work.seconds(sheet) for work in works) / _MS for sheet in sheets]
        figures[name] = figure(seconds / _MS, "ms", ends)
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


def measure_tuned_step(small: bool, report: Path) -> dict[str, Any]:
    """Time and trace a step with the table of `measure_tuning`, which is in the `report`; see `measure_step`."""
    table = read_object(report)["parts"].get("tune", {}).get("table") if report.exists() else None
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
        seconds = traced["untraced_seconds"]
        figures[f"decode step, batch {batch}"] = figure(seconds / _MS, "ms", _ends(traced["parts"].values()))
    return result


def measure_collectives(small: bool) -> dict[str, Any]:
    """Check every element of all collectives, and time those of training, in bf16, over all devices.

    Bus bandwidths are beside those of the links: at the fractions that others have measured, and at the data sheet's.
    """
    mesh, hardware, size = make_mesh(), find_hardware(jax.devices()[0].device_kind), 2**16 if small else 2**28
    result, figures, axes = check_collectives(), Figures(), nontrivial_axes(mesh, AXES)
    for collective in map(COLLECTIVES.__getitem__, _COLLECTIVES):
        case = Case(collective, mesh, axes, collective.elements(size, 2, mesh.size), "bfloat16")
        sent, ends = case.size * collective.factor(mesh.size), []
        if hardware:
            links, devices = (hardware.links, DATA_SHEET), range(mesh.size)
            ends = [sent / collective_seconds(collective.kind, sent, devices, hardware, link) / _GB for link in links]
        seconds = statistics.median(time_case(case, "graph", 2 if small else 5)["in_place"].seconds)
        figures[f"{collective.kind} of {size:,} bytes"] = figure(case.bus_bandwidth(seconds) / _GB, "GB/s", ends)
    return result | {"figures": figures}
