"""Break down the time of a training step, a prefill or a decode step by part, measured and predicted."""

import statistics
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from zaya_jax.config import Config, load_config
from zaya_jax.config.schema import ProfileConfig
from zaya_jax.config.stages import largest_stage, stage_at
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import find_hardware, no_data_sheet
from zaya_jax.hardware.measurements import get_hardware
from zaya_jax.hardware.presets import TRACED
from zaya_jax.lab.measure.breakdown.generation import Work, trace_generation
from zaya_jax.lab.measure.breakdown.trace import Trace, attribute, instruction_rows, read_trace
from zaya_jax.lab.measure.step import place_rows, random_tokens, time_train_steps
from zaya_jax.lab.predict.compilers.predict import Shares, phase_shares, predict
from zaya_jax.lab.predict.dry_run.estimate import estimate_phase, simulated_programs
from zaya_jax.lab.report.tables import TABLES
from zaya_jax.lab.result import describe_run, print_tables
from zaya_jax.ops.parts import OTHER, PARTS
from zaya_jax.parallel.kernels import validated_kernels
from zaya_jax.run.folder import PROFILE
from zaya_jax.run.run import Run
from zaya_jax.train.profiler import StepProfiler
from zaya_jax.train.program import make_programs
from zaya_jax.train.state import TrainState

_UNCLEAR = 0.05  # share of the time that may be in no part without a warning


def break_down(
    source: str, overrides: list[str], steps: int, hardware: str | None, instructions: int = 0
) -> dict[str, Any]:
    """Print and return where the time of a training step goes.

    Args:
      source: folder of a run whose steps were traced, or configuration file, whose steps are then traced here.
      overrides: of the configuration, as section.key=value; none for a run.
      steps: number of steps to trace of a configuration.
      hardware: name or folder, as `--hardware` of the dry run, whose estimate to compare with; or None.
      instructions: number of instructions to list.

    Raises:
      InputError: there is no trace in the run folder, the configuration cannot be trained here, or `hardware` is given
        for a traced step that is smaller than the one that the dry run estimates.
    """
    folder, untraced = Path(source), None
    if folder.is_dir():
        if overrides:
            raise InputError(f"{source} is a run, whose configuration is fixed: leave out {' '.join(overrides)}.")
        config, trace = Run(folder).config, read_trace(folder / PROFILE)
        if hardware is not None:
            check_largest_batch(config, trace.first_step)
    else:
        config = load_config(source, overrides)
        if config.lora is not None:
            raise InputError("lora must be null: adapters need the weights of init_from. Trace a run instead, with "
                             "profile.start=STEP.")  # fmt: skip
        if hardware is not None:
            get_hardware(hardware, jax.device_count())  # so that a mistake is named before anything is compiled
        with tempfile.TemporaryDirectory() as temporary:
            untraced = trace_random_steps(config, steps, Path(temporary))
            trace = read_trace(Path(temporary) / PROFILE)
    stage = stage_at(config, trace.first_step - 1)
    parallel, estimated = config.parallel_for(config.phases[stage.phase]), None
    shares = phase_shares(config.model, stage.context, {"expert": parallel.expert})
    if hardware is not None:
        sheet, programs = get_hardware(hardware, trace.devices), simulated_programs(config, trace.devices)
        estimated = estimate_phase(programs, stage.phase, sheet).step_seconds
    rows = trace_rows(trace, shares, instructions=instructions)
    if estimated is not None:
        rows["estimated_seconds"] = estimated
    return _report("training step", f"{trace.steps} steps of {source}", trace, untraced, rows)


def break_down_generation(
    source: str, overrides: list[str], work: Work, batch: int, prompt: int, repeats: int, instructions: int = 0
) -> dict[str, Any]:
    """Print and return where the time of a prompt, or of a decode step, goes, with random parameters.

    Args:
      source: configuration file.
      overrides: of the configuration, as section.key=value.
      work: what to trace.
      batch: number of prompts that are processed together.
      prompt: tokens of each; rounded up to whole chunks.
      repeats: number of prompts, or blocks of decode steps, to trace.
      instructions: number of instructions to list.

    Raises:
      InputError: prompt and new tokens exceed `model.max_positions`.
    """
    if Path(source).is_dir():
        raise InputError(f"{source} is a run, whose trace is of training: give a configuration file for --work {work}.")
    config = load_config(source, overrides)
    with tempfile.TemporaryDirectory() as temporary:
        trace, untraced, length, calls = trace_generation(
            config.model, config.train.compute_dtype, work, batch, prompt, repeats, Path(temporary)
        )
    what = {"prefill": "prefill", "decode": "decode step"}[work]
    size = f"{batch} × {length:,} tokens of {source}, {config.train.compute_dtype}"
    shares = phase_shares(config.model, length, {"expert": 1})
    return _report(what, size, trace, untraced, trace_rows(trace, shares, calls, instructions))


def _report(what: str, size: str, trace: Trace, untraced: float | None, rows: dict[str, Any]) -> dict[str, Any]:
    result = describe_run(f"{what} by part", size, "", ())
    result["hardware"]["device"] = trace.device
    result |= rows | {"what": what, "untraced_seconds": untraced}
    print_tables(TABLES["step"](result))
    return result


def check_largest_batch(config: Config, step: int) -> None:
    """Raise `InputError` if `step` has fewer sequences than the largest one of its phase, which a dry run estimates."""
    stage = stage_at(config, step - 1)
    largest = largest_stage(config, stage.phase)
    if stage.sequences < largest.sequences:
        raise InputError(f"--hardware estimates steps of {largest.sequences} sequences, but step {step} has "
                         f"{stage.sequences}: leave --hardware out, or trace a step after the batch ramp.")  # fmt: skip


def trace_random_steps(config: Config, steps: int, folder: Path) -> float:
    """Trace steps of the first phase on random tokens into `folder`, and return the median seconds of one untraced."""
    window = ProfileConfig(1, steps)
    programs = make_programs(replace(config, profile=window))
    programs.check()
    program, stage = programs.with_kernels(validated_kernels(config))[0], largest_stage(config, 0)
    compiled, tokens = program.compile(stage), random_tokens(config, stage)
    untraced, _, state = time_train_steps(program, compiled, stage, tokens, steps)
    trace_steps(compiled, state, place_rows(program, stage, tokens), window, folder)
    return statistics.median(untraced)


def trace_steps(
    compiled: Any, state: TrainState, batch: dict[str, jax.Array], window: ProfileConfig, folder: Path
) -> None:
    """Trace the steps of `window` on the same rows into `folder`; the state is donated."""
    profiler = StepProfiler(window, folder, lambda _: None)
    profiler.start(0, state, compiled)
    for _ in range(window.steps):  # without waiting, as in training
        state, _ = compiled(state, batch, {})
    profiler.stop(window.steps, state)


def trace_rows(trace: Trace, shares: Shares, calls: int = 1, instructions: int = 0) -> dict[str, Any]:
    """Return the times of a trace by part, for JSON, beside the prediction from the same program.

    Args:
      trace: the trace.
      shares: what the prediction assumes of the routing.
      calls: how often each step runs the program.
      instructions: number of instructions to list.
    """
    timeline, seconds, hardware = attribute(trace.intervals), trace.seconds / trace.steps, find_hardware(trace.device)
    measured = {part: time / trace.steps for part, time in timeline.parts.items()}
    exposed = timeline.exposed / trace.steps
    predicted = {} if hardware is None else predict(trace.entry, hardware, shares).parts
    parts = {}
    for name in dict.fromkeys((*measured, *(part for part in PARTS if part in predicted))):
        cost = predicted.get(name)
        parts[name] = {
            "measured": round(measured.get(name, 0.0), 6),
            "predicted": None if cost is None else round(calls * cost.seconds, 6),
            "roofline": None if cost is None else round(calls * cost.roofline, 6),
        }
    unattributed = round(seconds - sum(measured.values()) - exposed, 6)
    return {
        "steps": trace.steps,
        "seconds": round(seconds, 6),
        "parts": parts,
        "exposed_collectives": round(exposed, 6),
        "overlapped_collectives": round(timeline.overlapped / trace.steps, 6),
        "overlap": timeline.overlap,
        "unattributed": unattributed,
        "not_predicted": no_data_sheet(trace.device) if hardware is None else None,
        "warnings": _warnings(measured.get(OTHER, 0.0) / seconds, unattributed / seconds),
        "instructions": instruction_rows(trace, instructions),
    }


def _warnings(other: float, unattributed: float) -> list[str]:
    """Say what to do if parts do not explain a step, of whose time these shares are in none."""
    hidden = max(unattributed, 0.0)  # instructions that run at the same time count twice
    if other + hidden <= _UNCLEAR:
        return []
    total, other, hidden = (f"{100 * share:.1f} %" for share in (other + hidden, other, hidden))
    return [
        f"Warning: {total} of the time is in no part. {other} is other: --instructions 20 names the instructions, "
        f"please report them. In {hidden} (unattributed) the trace shows none: the device waits, or XLA_FLAGS sets "
        f"{TRACED.name}, whose graphs hide them."
    ]
