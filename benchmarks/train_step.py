"""Time the optimizer step that `zaya_jax.main` runs, and predict its time and memory from the same compiled program."""

import bisect
import math
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax

from zaya_jax.config import Config, ParallelConfig
from zaya_jax.config.schema import ProfileConfig
from zaya_jax.config.shipped import shipped
from zaya_jax.config.stages import micro_batch, stages
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import Hardware, no_data_sheet
from zaya_jax.lab.measure.step_parts import configuration, trace_rows, trace_steps
from zaya_jax.lab.measure.step_trace import read_trace
from zaya_jax.lab.measure.training_steps import (
    describe_throughput,
    peak_memory,
    place_rows,
    random_tokens,
    throughput,
    time_train_steps,
)
from zaya_jax.lab.predict.calibration import find_device
from zaya_jax.lab.predict.compilers.compiled import CompiledStep, peak_bytes, program_memory
from zaya_jax.lab.predict.compilers.compiled_report import as_json
from zaya_jax.lab.predict.compilers.hlo import parse
from zaya_jax.lab.predict.compilers.predict import phase_shares, predict
from zaya_jax.lab.predict.dry_run.estimate import PhaseEstimate, estimate_phase, simulated_programs
from zaya_jax.lab.result import rounded
from zaya_jax.model.arithmetic import total_parameters, training_flops_per_token
from zaya_jax.parallel.kernels import validated_kernels
from zaya_jax.run.folder import PROFILE
from zaya_jax.train.memory import available_memory, gigabytes
from zaya_jax.train.program import Programs

Layout = Literal["data", "fsdp"]
EIGHT_B = shipped("bench_8b.yaml")
# Fractions of a device's memory that the estimate may take; the next one is tried if the compiled step does not fit.
FRACTIONS = (0.85, 0.6, 0.4)
_MOVES = 20  # costliest fusions and copies in the result
_TRACED = ProfileConfig(1, steps=2)
_INSTRUCTIONS = 60  # in the result


def time_train_step(config: Config, layout: Layout, repeats: int) -> dict[str, Any]:
    """Time the first step of `config` on random tokens, on all devices, and trace two further ones.

    Each device, along the mesh axis `layout`, gets the tokens of `config`. Depth and micro-batch are reduced until the
    step fits; InputError if none does. Returns what was measured, the compiled program and the time `predicted` from it
    (or `not_predicted`, a sentence), and what `trace_rows` returns. `failed`: a sentence, if a loss is not finite.
    """
    kind, devices = jax.devices()[0].device_kind, jax.device_count()
    hardware = find_device(kind)
    config = replace(spread(config, layout, devices), profile=_TRACED)
    fitting = compile_fitting(config, devices, hardware, available_memory())
    config, estimate, compiled = fitting.config, fitting.estimate, fitting.compiled
    program, stage, model, tokens = fitting.programs[0], stages(config)[0], config.model, random_tokens(config)
    size = f"{model.num_layers} layers, {total_parameters(model):,} parameters, {stage.tokens:,} tokens per step"
    print(f"   {size} on {devices} × {kind}, layout {layout}; compiled in {fitting.seconds:.0f} s", flush=True)
    times, losses, state = time_train_steps(program, compiled, stage, tokens, repeats)
    flops = stage.tokens * training_flops_per_token(model, stage.context)
    speed = throughput(statistics.median(times), stage.tokens, flops, kind, devices)
    print(f"   {describe_throughput(speed)}", flush=True)
    sizes = {"layers": model.num_layers, "parameters": total_parameters(model), "tokens": stage.tokens}
    sizes |= {"context": stage.context, "micro_batch": estimate.sequences}
    settings = {"compute_dtype": config.train.compute_dtype, "remat": estimate.remat, "flops": flops}
    measured = {"step_seconds": rounded(times), "losses": [round(loss, 4) for loss in losses], **speed}
    estimated = {"seconds": estimate.step_seconds, "bytes": estimate.memory.total, "bounds": estimate.bounds}
    estimated["memory"] = estimate.memory._asdict()
    result = {"devices": devices, "layout": layout, **sizes, **settings, **measured}
    result |= {**peak_memory(jax.devices()[0], compiled), "estimated": estimated}
    result |= _describe_program(fitting, kind, devices, hardware)
    with tempfile.TemporaryDirectory() as folder:
        trace_steps(compiled, state, place_rows(program, stage, tokens), _TRACED, Path(folder))
        trace = read_trace(Path(folder) / PROFILE)
    shares, name = phase_shares(model, stage.context, {"expert": 1}), f"step of {model.num_layers} layers, {layout}"
    ran = configuration(trace, shares, 1, statistics.median(times), estimate.work)
    traced = trace_rows(trace, shares, instructions=_INSTRUCTIONS) | {"configurations": {name: ran}}
    traced.pop("not_predicted", None)
    for warning in traced["warnings"]:
        print(f"   {warning}", flush=True)
    result |= traced
    finite = all(map(math.isfinite, losses))
    return result if finite else result | {"failed": f"A loss is not finite: {result['losses']}."}


def spread(config: Config, layout: Layout, devices: int) -> Config:
    """Give each of `devices` the tokens per step of `config`, in the given layout."""
    phase, parallel = config.phases[0], ParallelConfig(fsdp=devices if layout == "fsdp" else 1)
    batch = config.batch_for(phase)
    batch = replace(batch, tokens=batch.tokens * devices)
    return replace(config, phases=(replace(phase, tokens=phase.tokens * devices, batch=batch, parallel=parallel),))


class Fitting(NamedTuple):
    """A step that fits the devices."""

    config: Config  # with the depth and micro-batch that fit
    estimate: PhaseEstimate  # the dry run's
    programs: Programs
    compiled: Any  # the step
    seconds: float  # to trace and compile it


def compile_fitting(config: Config, devices: int, hardware: Hardware | None, limit: int | None) -> Fitting:
    """Compile the largest step of `config` that needs at most `limit` bytes of each device; InputError if none fits."""
    kernels, refused, before = validated_kernels(config), "", None
    for fraction in FRACTIONS:
        try:
            fitting = config if limit is None else reduce_to_fit(config, devices, fraction * limit)
        except InputError as error:
            raise InputError(refused or str(error)) from error
        if fitting == before:  # the same program would not fit either
            continue
        before = fitting
        start, programs = time.monotonic(), Programs(fitting, kernels)
        programs.check()
        compiled = programs[0].compile(stages(fitting)[0])
        seconds, needed = round(time.monotonic() - start, 1), peak_bytes(program_memory(compiled))
        if limit is None or needed <= limit:
            estimate = estimate_phase(simulated_programs(fitting, devices), 0, hardware)
            return Fitting(fitting, estimate, programs, compiled, seconds)
        step = f"A step with {fitting.model.num_layers} layers needs {gigabytes(needed)} per device"
        refused = f"{step}, but only {gigabytes(limit)} is available."
        print(f"   {refused}", flush=True)
    raise InputError(refused)


def reduce_to_fit(config: Config, devices: int, limit: float) -> Config:
    """Reduce depth, then the micro-batch, until the dry run estimates at most `limit` bytes; InputError if none is."""
    if estimated_bytes(config, devices) <= limit:
        return config
    phase, period, micro = config.phases[0], len(config.model.period), micro_batch(config, stages(config)[0], devices)
    while micro:
        batch = replace(config.batch_for(phase), micro_batch=micro)
        tried = replace(config, phases=(replace(phase, batch=batch),))
        if fitting := deepest(tried, limit, lambda config: estimated_bytes(config, devices)):
            return fitting
        micro //= 2
    step, available = f"A step with {period} of the {config.model.num_layers} layers", gigabytes(int(limit))
    raise InputError(f"{step} does not fit: the devices have {available} each for it.")


def deepest(config: Config, limit: float, size: Callable[[Config], int]) -> Config | None:
    """Return `config` with the most layers, in whole periods, with which its `size` is in the limit; None for none."""
    period, layers = len(config.model.period), config.model.num_layers
    models = (replace(config.model, num_layers=depth) for depth in range(period, layers + 1, period))
    configs = [replace(config, model=model) for model in models]
    count = bisect.bisect_right(configs, limit, key=size)
    return configs[count - 1] if count else None


def estimated_bytes(config: Config, devices: int) -> int:
    """Return the dry run's estimate of the memory of each device."""
    return estimate_phase(simulated_programs(config, devices), 0, None).memory.total


def _describe_program(fitting: Fitting, kind: str, devices: int, hardware: Hardware | None) -> dict[str, Any]:
    compiled, seconds, axes = fitting.compiled, fitting.seconds, fitting.estimate.axes
    memory, host_bytes = program_memory(compiled), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = {"peak": peak_bytes(memory)}
    contents: dict[str, Any] = {"compiled": {"seconds": seconds, "host_bytes": host_bytes, "memory": memory | peak}}
    if hardware is None:
        return contents | {"predicted": None, "not_predicted": no_data_sheet(kind)}
    try:
        entry = parse(compiled.as_text())
        shares = phase_shares(fitting.config.model, stages(fitting.config)[0].context, axes)
        step = CompiledStep(kind, devices, memory, entry, [], seconds, host_bytes)
        described = as_json(step, predict(entry, hardware, shares), axes)
    except Exception as error:  # XLA's text changes between versions; the measurement is worth more
        reason = f"The compiled program could not be read ({type(error).__name__}: {str(error)[:200]})."
        return contents | {"predicted": None, "not_predicted": reason}
    predicted = described.pop("predicted")
    described["costliest"] = described["costliest"][:_MOVES]
    return {"compiled": described, "predicted": predicted}
