"""Measure collectives over sizes, device counts and dtypes: print nccl-tests' tables, fit, write JSON, plot."""

import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import ParallelConfig
from zaya_jax.errors import InputError
from zaya_jax.machine.collectives import text
from zaya_jax.machine.collectives.fit import Fit, fit_times
from zaya_jax.machine.collectives.operations import COLLECTIVES, Axes, label
from zaya_jax.machine.collectives.plot import draw
from zaya_jax.machine.collectives.programs import Case
from zaya_jax.machine.collectives.timing import Mode, Timing, time_case
from zaya_jax.machine.result import describe_run
from zaya_jax.parallel.mesh import AXES, AnyMesh, make_mesh, nontrivial_axes
from zaya_jax.parallel.multihost import is_primary


class Sweep(NamedTuple):
    """What to measure.

    Attributes:
      operations: names in `COLLECTIVES`.
      dtypes: names of dtypes.
      sizes: bytes, ascending.
      devices: numbers of devices, each the first so many of this process; empty for all devices of the job.
      layout: the mesh; with `devices` it has the axis data alone.
      axes: axes to run over; empty for all with more than one device.
      mode: see `timing.time_case`.
      repeats: number of timed calls of each case.
    """

    operations: tuple[str, ...]
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]
    devices: tuple[int, ...]
    layout: ParallelConfig
    axes: Axes
    mode: Mode
    repeats: int


def measure_collectives(sweep: Sweep, rows: Path | None = None, png: Path | None = None) -> dict[str, Any]:
    """Measure every case, and print the tables.

    Args:
      sweep: what to measure.
      rows: file to which each row is appended as a line of JSON, with versions and hardware.
      png: file for a plot of bandwidth and latency.

    Returns:
      The result, for JSON: `results` has a row for each case, `fits` one for each operation, dtype and number of
      devices. `failed`: a sentence, if an element was wrong.

    Raises:
      InputError: there are too few devices for a collective.
    """
    meshes = _meshes(sweep)
    result = describe_run("collectives", f"{sweep.sizes[0]:,} to {sweep.sizes[-1]:,} bytes, {sweep.mode}", "", ())
    result["hardware"] |= {"device": f"{jax.device_count()} × {jax.devices()[0].device_kind}",
                           "processes": jax.process_count()}  # fmt: skip
    head, result["results"], result["fits"] = dict(result), [], []
    for mesh in meshes:
        axes = sweep.axes or nontrivial_axes(mesh, AXES)
        for operation in sweep.operations:
            for dtype in sweep.dtypes:
                measured = _measure(sweep, mesh, axes, operation, dtype, head, rows)
                result["results"] += measured
                result["fits"].append(_fit(measured))
    if png and is_primary():
        draw(png, result["results"])
    if wrong := sorted({row["operation"] for row in result["results"] if row["wrong"]}):
        result["failed"] = f"Wrong results: {', '.join(wrong)}."
    return result


def _meshes(sweep: Sweep) -> list[AnyMesh]:
    if not sweep.devices:
        meshes = [_mesh(sweep.layout)]
    elif jax.process_count() > 1:
        raise InputError("--devices needs a single process. In a job of several, set the sizes of the mesh axes, and "
                         "--axis, which measures groups of devices side by side.")  # fmt: skip
    elif (most := max(sweep.devices)) > jax.device_count():
        raise InputError(f"--devices is {most}, but this process has {jax.device_count()}.")
    else:
        meshes = [make_mesh(devices=jax.devices()[:count]) for count in sweep.devices]
    for mesh in meshes:
        if any(mesh.shape[axis] == 1 for axis in sweep.axes) or mesh.size == 1:
            what = f"--axis {','.join(sweep.axes)} has" if sweep.axes else "There is"
            raise InputError(f"{what} one device, but a collective needs at least two. JAX_NUM_CPU_DEVICES=8 simulates "
                             "eight on a CPU.")  # fmt: skip
    return meshes


def _mesh(layout: ParallelConfig) -> AnyMesh:
    sizes = {f"--{axis} {size}": size for axis in AXES if (size := getattr(layout, axis)) not in (None, 1)}
    count, product = jax.device_count(), math.prod(sizes.values())
    if count % product or (layout.data is not None and count != product):
        raise InputError(f"{' × '.join(sizes)} is {product}, but must {'be' if layout.data else 'divide'} {count}, the "
                         "number of devices.")  # fmt: skip
    return make_mesh(layout)


def _measure(sweep: Sweep, mesh: AnyMesh, axes: Axes, operation: str, dtype: str, head: dict[str, Any],
             rows: Path | None) -> list[dict[str, Any]]:  # fmt: skip
    collective = COLLECTIVES[operation]
    probe, item = Case(collective, mesh, axes, 1, dtype), jnp.dtype(dtype).itemsize
    elements = dict.fromkeys(collective.elements(size, item, probe.ranks) for size in sweep.sizes)
    cases = [probe._replace(elements=count) for count in elements]
    _print(*text.header(label(collective), cases, sweep.mode, sweep.repeats))
    measured, columns = [], []
    for case in cases:
        timings = time_case(case, sweep.mode, sweep.repeats)
        halves = {name: text.column(case, statistics.fmean(timing.seconds), timing.wrong)
                  for name, timing in timings.items()}  # fmt: skip
        columns += halves.values()
        _print(text.row(case, halves.get("out_of_place"), halves["in_place"]))
        measured.append(_row(case, sweep.mode, timings))
        if rows and is_primary():
            with rows.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(head | measured[-1]) + "\n")
    _print(*text.footer(label(collective), columns), "")
    return measured


def _row(case: Case, mode: Mode, timings: dict[str, Timing]) -> dict[str, Any]:
    """Describe a measured case: statistics of its times in seconds, and bandwidths at the median in bytes/s."""
    row: dict[str, Any] = {
        "operation": label(case.collective), "mode": mode, "dtype": case.dtype, "devices": case.ranks,
        "groups": case.mesh.size // case.ranks, "axes": case.axes, "bytes": case.size,
        "wrong": sum(timing.wrong for timing in timings.values()),
    }  # fmt: skip
    for name, (seconds, _) in timings.items():
        median, mean = statistics.median(seconds), statistics.fmean(seconds)
        deviation = statistics.stdev(seconds) if len(seconds) > 1 else 0.0
        at_median = text.column(case, median, 0)
        row[name] = {
            "p50": median, "p99": float(np.percentile(seconds, 99)), "min": min(seconds), "max": max(seconds),
            "mean": mean, "cv": deviation / mean, "algbw": at_median.algbw, "busbw": at_median.busbw,
        }  # fmt: skip
    return row


def _fit(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first = measured[0]
    half = "out_of_place" if "out_of_place" in first else "in_place"
    fit = fit_times([row["bytes"] for row in measured], [row[half]["p50"] for row in measured])
    entry = {key: first[key] for key in ("operation", "mode", "dtype", "devices", "groups", "axes")}
    if fit is not None:
        beta = fit.beta._replace(high=fit.beta.high if math.isfinite(fit.beta.high) else None)
        entry |= {"alpha_seconds": fit.alpha._asdict(), "beta_bytes_per_second": beta._asdict(),
                  "half_bytes": fit.half_size, "knee_bytes": fit.knee}  # fmt: skip
    _print(_sentence(entry, fit), "")
    return entry


def _sentence(entry: dict[str, Any], fit: Fit | None) -> str:
    what = f"{entry['operation']} over {entry['devices']} devices, {entry['dtype']}"
    if fit is None:
        return f"{what}: no fit; times must grow with the size over at least three sizes"
    alpha, beta = fit.alpha, fit.beta
    return (f"{what}: latency {1e6 * alpha.value:,.3g} µs ({1e6 * alpha.low:,.3g} to {1e6 * alpha.high:,.3g}), "
            f"algorithm bandwidth {beta.value / 1e9:,.3g} GB/s ({beta.low / 1e9:,.3g} to {beta.high / 1e9:,.3g}); "
            f"half of it at {fit.half_size:,.0f} bytes, 90 % at {fit.knee:,.0f}")  # fmt: skip


def _print(*lines: str) -> None:
    if is_primary():
        print("\n".join(lines), flush=True)
