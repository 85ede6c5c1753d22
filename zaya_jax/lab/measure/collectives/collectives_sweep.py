"""Measure collectives over sizes, device counts and dtypes: print nccl-tests' tables, fit, write JSON, plot."""

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import stdtrit

from zaya_jax.config import Config, ParallelConfig
from zaya_jax.config.stages import largest_stage
from zaya_jax.errors import InputError
from zaya_jax.lab.measure.collectives import text
from zaya_jax.lab.measure.collectives.operations import COLLECTIVES, Axes, label
from zaya_jax.lab.measure.collectives.programs import Case, Mode, TimedCase, time_case
from zaya_jax.lab.measure.network_devices import Traffic
from zaya_jax.lab.predict.compilers.collectives import collectives, mesh_axes
from zaya_jax.lab.predict.compilers.hlo import parse
from zaya_jax.lab.result import describe_run, print_once, table_lines
from zaya_jax.lab.result_tables import message_table
from zaya_jax.parallel.kernels import validated_kernels
from zaya_jax.parallel.mesh import AXES, AnyMesh, make_mesh, nontrivial_axes
from zaya_jax.train.program import make_programs

_OPERATIONS = {collective.kind: name for name, collective in COLLECTIVES.items()} | {"ragged-all-to-all": "all_to_all"}
SATURATED = 0.9  # share of β that messages of the knee reach; larger buffers overlap less
CONFIDENCE = 0.95
_ROUNDS = 4  # of reweighting; the weights change by less than 1 % after the third


class Sweep(NamedTuple):
    """The measurements to make."""

    operations: tuple[str, ...]  # names in `COLLECTIVES`
    dtypes: tuple[str, ...]  # names of dtypes
    sizes: tuple[int, ...]  # bytes, ascending; unused for the messages of a configuration
    devices: tuple[int, ...]  # numbers of devices, each the first so many of this process; empty for all of the job
    layout: ParallelConfig  # the mesh; with `devices` it has the axis data alone
    axes: Axes  # axes to run over; empty for all with more than one device
    mode: Mode  # see `programs.time_case`
    repeats: int  # number of timed calls of each case


def measure_collectives(sweep: Sweep, config: Config | None = None) -> dict[str, Any]:
    """Measure every case, print the tables, and return the result, for JSON.

    With `config`, its training step says which sizes to measure over which axes, and `messages` has a row for each.
    `fits` has one for each operation, dtype, number of devices and axes; `traffic` has bytes by network interface of
    this host. `failed`: a sentence, if an element was wrong. InputError if there are too few devices for a collective.
    """
    messages: list[dict[str, Any]] = []
    if config is None:
        benchmark, size = "collectives", f"{sweep.sizes[0]:,} to {sweep.sizes[-1]:,} bytes"
        groups = _groups(sweep)
    else:
        benchmark, size = "messages of a training step", "the messages of a training step"
        _check_devices([make_mesh()], ())
        mesh, messages = model_messages(config)
        groups = _message_groups(sweep, mesh, messages)
    result = describe_run(benchmark, f"{size}, {sweep.mode}", "", ())
    device = f"{jax.device_count()} × {jax.devices()[0].device_kind}"
    result["hardware"] |= {"device": device, "processes": jax.process_count()}
    result["results"], result["fits"], traffic = [], [], Traffic()
    for probe, sizes in groups:
        measured = _measure(probe, sizes, sweep)
        result["results"] += measured
        result["fits"].append(_fit(measured))
    if messages:
        result["messages"] = _messages(messages, result["results"])
    result["traffic"] = traffic.bytes()
    if line := traffic.line("collectives ran on the first host"):
        print_once(line)
    if wrong := sorted({row["operation"] for row in result["results"] if row["wrong"]}):
        result["failed"] = f"Wrong results: {', '.join(wrong)}."
    return result


def _groups(sweep: Sweep) -> list[tuple[Case, Sequence[int]]]:
    """Return a case of each table, of one element, and its sizes in bytes."""
    meshes = [(mesh, sweep.axes or nontrivial_axes(mesh, AXES)) for mesh in _meshes(sweep)]
    cases = itertools.product(meshes, sweep.operations, sweep.dtypes)
    return [(Case(COLLECTIVES[name], mesh, axes, 1, dtype), sweep.sizes) for (mesh, axes), name, dtype in cases]


def _meshes(sweep: Sweep) -> list[AnyMesh]:
    if not sweep.devices:
        meshes = [_mesh(sweep.layout)]
    elif jax.process_count() > 1:
        advice = "set the sizes of the mesh axes, and --axis, which measures groups of devices side by side."
        raise InputError(f"--devices needs a single process. In a job of several, {advice}")
    elif (most := max(sweep.devices)) > jax.device_count():
        raise InputError(f"--devices is {most}, but this process has {jax.device_count()}.")
    else:
        meshes = [make_mesh(devices=jax.devices()[:count]) for count in sweep.devices]
    _check_devices(meshes, sweep.axes)
    return meshes


def _check_devices(meshes: Sequence[AnyMesh], axes: Axes) -> None:
    for mesh in meshes:
        if any(mesh.shape[axis] == 1 for axis in axes) or mesh.size == 1:
            what = f"--axis {','.join(axes)} has" if axes else "There is"
            more = "JAX_NUM_CPU_DEVICES=8 simulates eight on a CPU."
            raise InputError(f"{what} one device, but a collective needs at least two. {more}")


def _mesh(layout: ParallelConfig) -> AnyMesh:
    sizes = {f"--{axis} {size}": size for axis in AXES if (size := getattr(layout, axis)) not in (None, 1)}
    count, product, must = jax.device_count(), math.prod(sizes.values()), "be" if layout.data else "divide"
    if count % product or (layout.data is not None and count != product):
        raise InputError(f"{' × '.join(sizes)} is {product}, but must {must} {count}, the number of devices.")
    return make_mesh(layout)


def model_messages(config: Config) -> tuple[AnyMesh, list[dict[str, Any]]]:
    """Compile the first phase's largest step for the devices of this job; return its mesh and its messages by size."""
    programs = make_programs(config)
    programs.check()
    program = programs.with_kernels(validated_kernels(config))[0]
    mesh, counts = program.placement.mesh, Counter[tuple[str, Axes, int]]()
    compiled = program.trace(largest_stage(config, 0)).lower().compile()
    for sent in collectives(parse(compiled.as_text() or "")):
        if axes := mesh_axes(sent.kind, sent.groups, mesh.shape):
            counts[_OPERATIONS[sent.kind], axes, sent.bytes] += sent.place.times
    found = sorted(counts.items(), key=lambda item: (-item[0][2], item))
    return mesh, [{"operation": name, "axes": axes, "bytes": size, "times": x} for (name, axes, size), x in found]


def _message_groups(
    sweep: Sweep, mesh: AnyMesh, messages: Sequence[dict[str, Any]]
) -> list[tuple[Case, Sequence[int]]]:
    sizes: dict[tuple[str, Axes], list[int]] = {}
    for message in messages:
        if message["operation"] in sweep.operations:
            sizes.setdefault((message["operation"], message["axes"]), []).append(message["bytes"])
    cases = itertools.product(sorted(sizes.items()), sweep.dtypes)
    return [(Case(COLLECTIVES[name], mesh, axes, 1, dtype), sorted(each)) for ((name, axes), each), dtype in cases]


def _messages(messages: Sequence[dict[str, Any]], results: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for message in messages:
        measured = (label(COLLECTIVES[message["operation"]]), message["axes"])
        if near := [row for row in results if (row["operation"], row["axes"]) == measured]:  # [] if it was left out
            # Sizes are rounded to whole elements in each chunk.
            nearest = min(near, key=lambda row: abs(row["bytes"] - message["bytes"]))
            rows.append(message | {"seconds": nearest[_half(nearest)]["p50"]})
    total = sum(row["times"] * row["seconds"] for row in rows)
    print_once(*table_lines(message_table(rows)))
    print_once(f"A step's messages take {1e3 * total:,.2f} ms one after the other, before any overlap.", "")
    return rows


def _half(row: dict[str, Any]) -> str:
    return "out_of_place" if "out_of_place" in row else "in_place"


def _measure(probe: Case, sizes: Sequence[int], sweep: Sweep) -> list[dict[str, Any]]:
    item, name = jnp.dtype(probe.dtype).itemsize, label(probe.collective)
    elements = dict.fromkeys(probe.collective.elements(size, item, probe.ranks) for size in sizes)
    cases, measured, printed = [probe._replace(elements=count) for count in elements], [], list[TimedCase]()
    print_once(*text.header(name, cases, sweep.mode, sweep.repeats))
    for case in cases:
        timings = time_case(case, sweep.mode, sweep.repeats)
        printed += timings.values()
        print_once(text.row(timings.get("out_of_place"), timings["in_place"]))
        measured.append(_row(case, sweep.mode, timings))
    print_once(*text.footer(name, printed), "")
    return measured


def _row(case: Case, mode: Mode, timings: dict[str, TimedCase]) -> dict[str, Any]:
    """Describe a measured case: statistics of its times in seconds, and bandwidths at the median in bytes/s."""
    row: dict[str, Any] = {"operation": label(case.collective), "mode": mode, "dtype": case.dtype}
    row |= {"devices": case.ranks, "groups": case.mesh.size // case.ranks, "axes": case.axes, "bytes": case.size}
    row["wrong"] = sum(timing.wrong for timing in timings.values())
    for name, (_, seconds, _) in timings.items():
        mean, median = statistics.fmean(seconds), statistics.median(seconds)
        deviation = statistics.stdev(seconds) if len(seconds) > 1 else 0.0
        row[name] = {"p50": median, "p99": float(np.percentile(seconds, 99)), "min": min(seconds), "max": max(seconds)}
        row[name] |= {"mean": mean, "cv": deviation / mean}
        row[name] |= {"algbw": case.bandwidth(median), "busbw": case.bus_bandwidth(median)}
    return row


def fit_times(sizes: Sequence[float], seconds: Sequence[float]) -> dict[str, Any]:
    """Fit by least squares of relative errors, since times of all sizes scatter by similar percentages.

    The weights are those of the fitted times, so that a time that happens to be short does not count more.
    `alpha_seconds` is the time of an empty message, β the algorithm bandwidth of an infinite one, with confidence
    intervals of Student's t distribution, that of β from its inverse, the slope; `half_bytes` reaches half of β,
    `knee_bytes` `SATURATED` of it. {} with fewer than three different `sizes` in bytes, or if times do not grow with
    the size.
    """
    size, time = np.asarray(sizes, float), np.asarray(seconds, float)
    if len(set(sizes)) < 3:
        return {}
    weights, line, covariance = 1 / time, np.zeros(2), np.zeros((2, 2))
    for _ in range(_ROUNDS):
        line, covariance = np.polyfit(size, time, 1, w=weights, cov=True)
        weights = 1 / np.maximum(np.polyval(line, size), 0.1 * time)
    margins = np.sqrt(np.diag(covariance)) * stdtrit(len(size) - 2, (1 + CONFIDENCE) / 2)
    (slope, start), low, high = line.tolist(), (line - margins).tolist(), (line + margins).tolist()
    if slope <= 0:
        return {}
    half, fastest = max(start, 0.0) / slope, 1 / low[0] if low[0] > 0 else None
    alpha = {"value": start, "low": low[1], "high": high[1]}
    beta = {"value": 1 / slope, "low": 1 / high[0], "high": fastest}
    knee = half * SATURATED / (1 - SATURATED)
    return {"alpha_seconds": alpha, "beta_bytes_per_second": beta, "half_bytes": half, "knee_bytes": knee}


def _fit(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    first, half = measured[0], _half(measured[0])
    fit = fit_times([row["bytes"] for row in measured], [row[half]["p50"] for row in measured])
    entry = {key: first[key] for key in ("operation", "mode", "dtype", "devices", "groups", "axes")}
    what = f"{entry['operation']} over {entry['devices']} devices, {entry['dtype']}"
    if not fit:
        print_once(f"{what}: no fit; times must grow with the size over at least three sizes", "")
        return entry
    latency, *latencies = (f"{1e6 * value:,.3g}" for value in fit["alpha_seconds"].values())
    speeds = (math.inf if value is None else value for value in fit["beta_bytes_per_second"].values())
    bandwidth, *bandwidths = (f"{value / 1e9:,.3g}" for value in speeds)
    print_once(
        f"{what}: latency {latency} µs ({' to '.join(latencies)}), algorithm bandwidth {bandwidth} GB/s "
        f"({' to '.join(bandwidths)}); half of it at {fit['half_bytes']:,.0f} bytes, 90 % at {fit['knee_bytes']:,.0f}",
        "",
    )
    return entry | fit
