"""The dry run: estimate every phase, compile its step, and report whether it fits and how long it takes."""

import json
import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from zaya_jax.config import Config
from zaya_jax.config.checks import counted, require
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE, Hardware
from zaya_jax.lab.predict.calibration import get_device
from zaya_jax.lab.predict.compilers import compiled_report as compiler_report
from zaya_jax.lab.predict.compilers.compiled import CompiledStep, check_devices, compile_step, prove
from zaya_jax.lab.predict.compilers.predict import Prediction, phase_shares, predict
from zaya_jax.lab.predict.compilers.toolchain import find_toolchain
from zaya_jax.lab.predict.dry_run.estimate import PhaseEstimate, advice, estimate_phase, simulated_programs
from zaya_jax.lab.predict.dry_run.search import suggestion_lines, suggestions
from zaya_jax.lab.predict.step_time import basis, span
from zaya_jax.ops.registry import check_pinned
from zaya_jax.parallel.storage import StoredRow, storage_rows, storage_table
from zaya_jax.run.progress import track
from zaya_jax.run.table import format_table, size_text

_GB = 1e9


class _Phase(NamedTuple):
    """A phase: its estimate, and either a proof for CPUs or the step compiled for a GPU."""

    estimate: PhaseEstimate
    proof: dict[str, Any] | None = None
    compiled: tuple[CompiledStep, Prediction] | None = None
    storage: Sequence[StoredRow] = ()

    @property
    def step_seconds(self) -> float | None:
        return self.compiled[1].seconds if self.compiled else self.estimate.step_seconds

    @property
    def most_seconds(self) -> float:
        return self.compiled[1].most if self.compiled else self.estimate.most_seconds

    @property
    def seconds(self) -> tuple[float, float]:
        return (self.step_seconds or 0.0) * self.estimate.steps, self.most_seconds * self.estimate.steps


def dry_run(
    config: Config,
    devices: int,
    hardware: str | None = None,
    as_json: bool = False,
    gpu: str | None = None,
    suggest: bool = False,
) -> str:
    """Estimate each phase on `devices` devices, compile its step for that many, and return the report, or its JSON.

    `hardware` is as in `get_device`; None is that of `gpu`, or without both no times and no comparison of memory.
    `gpu` names one of `compilers.gpus.GPUS` to compile for; None compiles for simulated CPU devices. With `suggest`,
    faster settings are searched.

    InputError if `hardware` is unknown or not `gpu`, a layout or batch does not fit the devices, the packages that
    compile for `gpu` are missing, or `suggest` is asked for without hardware.
    """
    require(devices >= 1, "--devices", devices, "at least 1")
    config.check()
    check_pinned(config.ops)
    if gpu is not None:
        check_devices(gpu, devices)
        if hardware is not None and get_device(hardware, devices).kinds != HARDWARE[gpu].kinds:
            allowed = f"{gpu}, measurements of one, or omitted with --compile-for {gpu}"
            raise InputError(f"--hardware is {hardware}, but must be {allowed}.")
        find_toolchain(gpu)
        hardware = hardware or gpu
    device = None if hardware is None else get_device(hardware, devices)
    if suggest and device is None:
        raise InputError("--suggest needs --hardware NAME or --compile-for GPU, to compare times.")
    programs, phases = simulated_programs(config, devices), list[_Phase]()
    for index in track("compiling the step of", range(len(config.phases)), config.phase_key):
        estimate, program = estimate_phase(programs, index, device), programs[index]
        rows = storage_rows(program.placement, [program.abstract_state, program.abstract_base])
        if gpu is None or device is None:
            phases.append(_Phase(estimate, proof=prove(config, index, devices), storage=rows))
        else:
            step = compile_step(config, index, gpu, devices)
            shares = phase_shares(config.model, config.context_for(config.phases[index]), estimate.axes)
            phases.append(_Phase(estimate, compiled=(step, predict(step.entry, device, shares)), storage=rows))
    by_phase = [suggestions(config, index, devices, device, gpu) for index in range(len(phases)) if suggest and device]
    if as_json:
        rows = [_json(phase, device) for phase in phases]
        for row, suggested in zip(rows, by_phase, strict=False):
            row["suggestions"] = suggested
        return json.dumps({"devices": devices, "hardware": hardware, "phases": rows}, indent=1)
    summary = [line for phase in phases for line in _answer(phase, device)]
    if device is None:
        names = ", ".join(HARDWARE)
        summary.append(f"To estimate the step time and check that it fits in memory, add --hardware NAME ({names}).")
    elif len(phases) > 1:
        total = span(map(sum, zip(*(phase.seconds for phase in phases), strict=True)), _duration)
        summary.append(f"All phases: {total} on {counted(devices, 'device')}")
    for phase, suggested in zip(phases, by_phase, strict=False):
        summary += suggestion_lines(phase.estimate.phase, suggested)
    if others := sorted(config.ops.items() - programs.kernels.pinned.items()):
        names = ", ".join(f"ops.{name}={kernel}" for name, kernel in others)
        summary.append(f"Estimates are those of the default kernels in place of {names}.")
    details = ["\n".join(_details(phase, device)) for phase in phases]
    return "\n\n".join([_heading(devices, hardware, device, gpu), "\n".join(summary), *details])


def _duration(seconds: float) -> str:
    for unit, size in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _unit(largest: float, name: str) -> tuple[float, str]:
    """Return the size and the name of the largest unit, such as 1e6 and MB, that the value `largest` reaches."""
    units = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
    size, prefix = next((unit for unit in units if largest >= unit[0]), units[-1])
    return size, f"{prefix}{name}"


def _step(seconds: float, most: float) -> str:
    unit, name = (1.0, "s") if seconds >= 0.1 else (1e-3, "ms")
    return f"{span((seconds, most), lambda value: f'{value / unit:.2f}')} {name}/step"


def _heading(devices: int, name: str | None, device: Hardware | None, gpu: str | None) -> str:
    first = counted(devices, "device")
    source = "estimated from shapes" if gpu is None else f"those of XLA's program for {gpu}"
    memory = f"Memory and network traffic are {source}."
    if device is None:
        return "\n".join([first, memory])
    peak = f"{device.peak / 1e12:.3g} TFLOP/s" if device.measured else f"{device.peak / 1e12:.0f} TFLOP/s in bf16"
    first += f", {name}: {device.memory / _GB:.0f} GB at {device.bandwidth / 1e12:.2f} TB/s, {peak}"
    if devices > 1 or not device.measured:
        node, between = (f"{speed / _GB:.0f} GB/s" for speed in (device.intra_node, device.inter_node))
        first += f"; links {node} within a node of {device.node_size}, {between} between nodes"
    return "\n".join([basis(device, name or ""), first, memory])


def _json(phase: _Phase, hardware: Hardware | None) -> dict[str, Any]:
    estimate = phase.estimate
    described = {"summary": _summary(phase, hardware), **estimate._asdict()}
    described["memory"] = {**estimate.memory._asdict(), "total": estimate.memory.total}
    described["work"] = [work._asdict() for work in estimate.work]
    described["storage"] = [stored._asdict() for stored in phase.storage]
    described["transfers"] = [transfer._asdict() for transfer in estimate.transfers]
    compiled = compiler_report.as_json(*phase.compiled, estimate.axes) if phase.compiled else phase.proof
    return described | {"compiled": compiled}


def _summary(phase: _Phase, hardware: Hardware | None) -> dict[str, Any]:
    """Describe whether a phase fits, its speed, and what to change; without hardware, its memory alone."""
    estimate, seconds = phase.estimate, phase.step_seconds
    memory = phase.compiled[0].peak_memory if phase.compiled else estimate.memory.total
    if hardware is None or seconds is None:
        return {"bytes": memory}
    parts = phase.compiled[1].components if phase.compiled else estimate.seconds
    fits = memory <= hardware.allocatable
    speed = estimate.tokens / seconds / math.prod(estimate.axes.values())
    shares = {name: part / seconds for name, part in sorted(parts.items(), key=lambda item: -item[1])}
    summary = {"bytes": memory, "allocatable_bytes": hardware.allocatable, "fits": fits, "step_seconds": seconds}
    least = speed * seconds / phase.most_seconds
    summary |= {"most_step_seconds": phase.most_seconds, "least_tokens_per_second_per_device": least}
    summary |= {"tokens_per_second_per_device": speed, "phase_seconds": phase.seconds, "shares": shares}
    return summary | {"try": [] if fits else advice(estimate, hardware)}


def _answer(phase: _Phase, hardware: Hardware | None) -> list[str]:
    """Render the summary of a phase."""
    summary, name = _summary(phase, hardware), phase.estimate.phase
    if hardware is None or "fits" not in summary:
        return [f"Phase {name}: {size_text(summary['bytes'])} per device"]
    shares = ", ".join(f"{share:.0%} {part}" for part, share in list(summary["shares"].items())[:3])
    least, most = (summary[f"{end}tokens_per_second_per_device"] for end in ("least_", ""))
    speed = f"{span((least, most), '{:,.0f}'.format)} tokens/s per device, {span(summary['phase_seconds'], _duration)}"
    return [
        f"Phase {name}: {'fits' if summary['fits'] else 'DOES NOT FIT'}, {summary['bytes'] / _GB:.1f} of "
        f"{hardware.allocatable / _GB:.1f} GB per device that XLA may allocate",
        f"  {_step(summary['step_seconds'], summary['most_step_seconds'])}, {speed}; "
        f"{'predicted' if phase.compiled else 'estimated'}: {shares}",
        *([f"  try: {'; '.join(summary['try'])}"] if summary["try"] else []),
    ]


def _details(phase: _Phase, hardware: Hardware | None) -> list[str]:
    """One phase in detail."""
    estimate, proof, memory = phase.estimate, phase.proof, phase.estimate.memory
    axes = " × ".join(f"{name} {size}" for name, size in estimate.axes.items() if size > 1)
    lines = [
        f"Phase {estimate.phase}",
        f"  layout: {axes or 'one device'}; remat {estimate.remat}",
        f"  step: {estimate.tokens:,} tokens; per device {estimate.micro_batches} × micro_batch {estimate.sequences}",
        *(f"  {line}" for line in storage_table(phase.storage, estimate.axes)),
    ]
    if phase.compiled is not None and hardware is not None:
        lines += compiler_report.details(*phase.compiled, hardware, estimate.axes)
        seconds = _step(estimate.step_seconds or 0.0, estimate.most_seconds)
        lines.append(f"  estimated without the compiler: {memory.total / _GB:.2f} GB, {seconds}")
    elif proof is not None:
        used = f"{proof['host_bytes'] / _GB:.1f} GB of this machine's memory"
        lines.append(f"  {proof['proof']} for this layout in {proof['seconds']} s, with {used}")
    byte_unit, byte_name = _unit(memory.total, "B")
    flop_unit, flop_name = _unit(max(estimate.flops.values()), "FLOP")
    sizes = {**memory._asdict(), "peak": memory.total}.items()
    lines += _pairs("memory per device", ((name, f"{size / byte_unit:.2f} {byte_name}") for name, size in sizes))
    lines[-1] += " = parameters + optimizer + frozen + max(update, everything else)"
    flops = ((name, f"{count / flop_unit:,.1f} {flop_name}") for name, count in estimate.flops.items())
    sent = (
        f"    {x.what}, {x.kind} over {', '.join(x.axes)}: {x.bytes / byte_unit:.3f} {byte_name}"
        for x in estimate.transfers
    )
    lines += _pairs("FLOPs per step, all devices", flops)
    lines += ["  sent per device per step" + ("" if estimate.transfers else ": nothing"), *sent]
    if estimate.bounds:
        bounds = ", ".join(f"{name} {value:.3f}" for name, value in estimate.bounds.items())
        lines.append(f"  lower bounds in s/step, each at 100% of its peak: {bounds}")
    return lines


def _pairs(title: str, rows: Iterable[tuple[str, str]]) -> list[str]:
    return [f"  {title}", *(f"    {line}" for line in format_table(rows))]
