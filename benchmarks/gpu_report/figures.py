"""Figures of a step and of kernels, beside what was predicted for the device."""

import statistics
from collections.abc import Mapping
from typing import Any

from zaya_jax.hardware.data_sheets import find_hardware
from zaya_jax.lab.predict.step_time import Work

# By name: value (None if it was not measured), unit and, if there is one, the prediction.
Figures = dict[str, list[Any]]
_GB, _MS = 1e9, 1e-3


def step_figures(part: Mapping[str, Any], kind: str) -> Figures:
    """Return time, speed and memory of a step from `train_step.time_train_step`, and the times of its parts.

    Predicted are the time from the compiled program, and the compiler's memory.
    """
    predicted = None if part["predicted"] is None else part["predicted"]["seconds"]
    measured = statistics.median(part["step_seconds"])

    def per_second(work: float, unit: str) -> list[Any]:
        return [_short(work / measured), unit, None if predicted is None else _short(work / predicted)]

    hardware = find_hardware(kind)
    peak = part["peak_bytes"] / _GB if part["peak_bytes_by"] == "the device" else None
    figures: Figures = {
        "step": [_short(measured), "s", predicted and _short(predicted)],
        "speed": per_second(part["tokens"], "tokens/s"),
        "peak memory": [peak and _short(peak), "GB", _short(part["compiled"]["memory"]["peak"] / _GB)],
    }
    if hardware is not None:
        figures["MFU"] = per_second(100 * part["flops"] / part["devices"] / hardware.peak, "%")
    for name, row in part.get("parts", {}).items():
        times = row["measured"], row["predicted"]
        figures[f"part {name}"] = [_short(times[0] / _MS), "ms", times[1] and _short(times[1] / _MS)]
    return figures


def kernel_figures(part: Mapping[str, Any], kind: str) -> Figures:
    """Return the times of kernels from `kernels.bench_kernels`, and their speed relative to XLA and PyTorch.

    Predicted is the time of a kernel's FLOPs or bytes at fractions of the data sheet's peaks.
    """
    hardware, figures = find_hardware(kind), Figures()
    for name, row in part["results"].items():
        if (seconds := row["median_seconds"].get("kernel")) is None:
            continue
        work = Work(name, row["bytes"], row["flops"], "kernel")
        figures[name] = [_short(seconds / _MS), "ms", hardware and _short(work.seconds(hardware) / _MS)]
        for peer, title in (("reference", "XLA"), ("peer", "PyTorch")):
            if row.get(peer) is not None:
                figures[f"{name} against {title}"] = [row[peer], "×"]
    return figures


def _short(value: float) -> float:
    return float(f"{value:.4g}")
