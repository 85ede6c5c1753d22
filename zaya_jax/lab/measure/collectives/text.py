"""The table of nccl-tests 2.17 (github.com/NVIDIA/nccl-tests, src/util.cu), which existing parsers read."""

import os
import socket
import statistics
from collections.abc import Sequence

import jax
import numpy as np

from zaya_jax.lab.measure.collectives.programs import WARM_UP, Case, Mode, TimedCase

TYPES = {"float32": "float", "float16": "half", "bfloat16": "bfloat16", "int8": "int8", "int32": "int32"}
_COLUMNS = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}  {:>7}  {:>6}  {:>6}  {:>6}  {:>7}  {:>6}  {:>6}  {:>6} "


def header(name: str, cases: Sequence[Case], mode: Mode, repeats: int) -> list[str]:
    """Return the lines before the rows of one operation."""
    sizes = [case.size for case in cases]
    factor = sizes[-1] // sizes[-2] if len(sizes) > 1 else 2
    gpus, graph, host = jax.local_device_count(), int(mode == "graph"), socket.gethostname()[:10]
    lines = [
        f"# Collective test starting: {name}_perf",
        f"# nThread 1 nGpus {gpus} minBytes {min(sizes)} maxBytes {max(sizes)} step: {factor}(factor) warmup iters: "
        f"{WARM_UP} iters: {repeats} agg iters: 1 validation: 1 graph: {graph} unalign: 0",
        "#",
        "# Using devices",
    ]
    for rank, device in enumerate(np.asarray(cases[0].mesh.devices).flat):
        pid = os.getpid() if device.process_index == jax.process_index() else 0
        group, index = rank // cases[0].ranks, device.local_hardware_id or 0
        place = f"{host:>10} device {index:2} [0000:00:00] {device.device_kind}"
        lines.append(f"#  Rank {rank:2} Group {group:2} Pid {pid:6} on {place}")
    names, units = ("size", "count", "type", "redop", "root"), ("(B)", "(elements)", "", "", "")
    return [
        *lines,
        "#",
        f"#{'':51}           out-of-place                       in-place          ",
        _COLUMNS.format(*names, *["time", "algbw", "busbw", "#wrong"] * 2),
        _COLUMNS.format(*units, *["(us)", "(GB/s)", "(GB/s)", ""] * 2),
    ]


def row(out_of_place: TimedCase | None, in_place: TimedCase) -> str:
    """Return the line of a case; without a time out of place, its columns are blank."""
    case = in_place.case
    operation, dtype = case.collective, TYPES[case.dtype]
    count = operation.passed(case.elements, case.ranks)
    start = f"{case.size:12}  {count:12}  {dtype:>8}  {operation.reduction:>6}  {operation.root:6}"
    return start + (_half(out_of_place) if out_of_place else " " * 32) + _half(in_place)


def footer(name: str, halves: Sequence[TimedCase]) -> list[str]:
    """Return the lines after the rows of one operation."""
    wrong = sum(bool(half.wrong) for half in halves)
    bandwidth = statistics.fmean(half.case.bus_bandwidth(half.mean) for half in halves) / 1e9
    return [
        f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# {'Avg bus bandwidth':<20} : {bandwidth:g} ",
        "#",
        f"# Collective test concluded: {name}_perf",
    ]


def _half(half: TimedCase) -> str:
    case, seconds = half.case, half.mean
    algbw, busbw = (_number(speed / 1e9, 6) for speed in (case.bandwidth(seconds), case.bus_bandwidth(seconds)))
    return f"  {_number(seconds * 1e6, 7)}  {algbw}  {busbw}  {half.wrong:6g}"


def _number(value: float, width: int) -> str:
    """Format with as many decimals, two at most, as fit the width."""
    for decimals in (2, 1, 0):
        if len(text := f"{value:{width}.{decimals}f}") <= width:
            return text
    return f"{value:{width}.{1 if width >= 7 else 0}e}"
