"""Break down the time of a training step, a prefill or a decode step by part, measured and predicted."""

import collections
import functools
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from zaya_jax.config import Config, ModelConfig, load_config
from zaya_jax.config.schema import ProfileConfig
from zaya_jax.config.stages import largest_stage, stage_at
from zaya_jax.errors import InputError
from zaya_jax.generate.engine import CHUNK, Engine, Work
from zaya_jax.generate.steps import BLOCK
from zaya_jax.hardware.data_sheets import no_data_sheet
from zaya_jax.hardware.environment import step_options
from zaya_jax.hardware.presets import TRACED
from zaya_jax.lab.measure.step_trace import Trace, attribute, instruction_rows, read_trace
from zaya_jax.lab.measure.timing import time_calls
from zaya_jax.lab.measure.training_steps import place_rows, random_tokens, time_train_steps
from zaya_jax.lab.predict.calibration import as_row, find_device, get_device, kernel_sources
from zaya_jax.lab.predict.compilers.predict import Shares, launched, phase_shares, predict
from zaya_jax.lab.predict.dry_run.estimate import estimate_phase, simulated_programs
from zaya_jax.lab.predict.step_time import Work as Cost
from zaya_jax.lab.result import describe_run, print_tables
from zaya_jax.lab.result_tables import TABLES
from zaya_jax.model.tree import compute_dtypes, map_variables, roles
from zaya_jax.model.zaya import Zaya
from zaya_jax.ops.parts import OTHER, PARTS
from zaya_jax.ops.target import GPU_PLATFORMS, current_target
from zaya_jax.parallel.kernels import validated_kernels
from zaya_jax.run.folder import PROFILE
from zaya_jax.run.run import Run
from zaya_jax.train.profiler import StepProfiler
from zaya_jax.train.program import known_options, make_programs
from zaya_jax.train.state import TrainState

# Parts of the step by the work of the dry run's estimate that they belong to; all others move bytes.
_SUMS = {"head": ("loss",), "newton_schulz": ("optimizer",),
         "layers": ("experts", "attention", "cca_mix", "router", "dispatch")}  # fmt: skip
_UNCLEAR = 0.05  # share of the time that may be in no part without a warning


def break_down(
    source: str, overrides: list[str], steps: int, hardware: str | None, instructions: int = 0
) -> dict[str, Any]:
    """Print and return where the time of a training step goes, beside the dry run's estimate for `hardware`.

    `source` is a run whose steps were traced, or a configuration file, of which `steps` steps are then traced here.
    InputError if a run has no trace, the configuration cannot be trained here, or the dry run estimates larger steps.
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
            advice = "Trace a run instead, with profile.start=STEP"
            raise InputError(f"lora must be null: adapters need the weights of init_from. {advice}.")
        if hardware is not None:
            get_device(hardware, jax.device_count())  # so that a mistake is named before anything is compiled
        with tempfile.TemporaryDirectory() as temporary:
            untraced = trace_random_steps(config, steps, Path(temporary))
            trace = read_trace(Path(temporary) / PROFILE)
    stage = stage_at(config, trace.first_step - 1)
    parallel = config.parallel_for(config.phases[stage.phase])
    shares = phase_shares(config.model, stage.context, {"expert": parallel.expert})
    rows = trace_rows(trace, shares, instructions=instructions)
    if hardware is not None:
        sheet, programs = get_device(hardware, trace.devices), simulated_programs(config, trace.devices)
        rows["estimated_seconds"] = estimate_phase(programs, stage.phase, sheet).step_seconds
    return _report("training step", f"{trace.steps} steps of {source}", trace, untraced, rows)


def break_down_generation(
    source: str, overrides: list[str], work: Work, batch: int, prompt: int, repeats: int, instructions: int = 0
) -> dict[str, Any]:
    """Print and return where the time of prompts, or of a decode step, goes; InputError for a run or many tokens."""
    if Path(source).is_dir():
        raise InputError(f"{source} is a run, whose trace is of training: give a configuration file for --work {work}.")
    config = load_config(source, overrides)
    dtype = config.train.compute_dtype
    with tempfile.TemporaryDirectory() as temporary:
        traced = trace_generation(config.model, dtype, work, batch, prompt, repeats, Path(temporary))
    trace, untraced, length, calls = traced
    what = "decode step" if work == "decode" else work
    size = f"{batch} × {length:,} tokens of {source}, {dtype}"
    shares = phase_shares(config.model, length, {"expert": 1})
    rows = trace_rows(trace, shares, calls, instructions)
    return _report(what, size, trace, untraced, rows) | {"ran": configuration(trace, shares, calls, untraced)}


def _report(what: str, size: str, trace: Trace, untraced: float | None, rows: dict[str, Any]) -> dict[str, Any]:
    result = describe_run(f"{what} by part", size, "", ())
    result["hardware"]["device"] = trace.device
    result |= rows | {"what": what, "untraced_seconds": untraced}
    print_tables(TABLES["step"](result))
    return result


def check_largest_batch(config: Config, step: int) -> None:
    """Raise `InputError` if `step` has fewer sequences than the largest one of its phase, which a dry run estimates."""
    stage = stage_at(config, step - 1)
    largest = largest_stage(config, stage.phase).sequences
    if stage.sequences < largest:
        problem = f"--hardware estimates steps of {largest} sequences, but step {step} has {stage.sequences}"
        raise InputError(f"{problem}: leave --hardware out, or trace a step after the batch ramp.")


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


def trace_steps(compiled: Any, state: TrainState, batch: Any, window: ProfileConfig, folder: Path) -> None:
    """Trace the steps of `window` on the same rows into `folder`; the state is donated."""
    profiler = StepProfiler(window, folder, lambda _: None)
    profiler.start(0, state, compiled)
    for _ in range(window.steps):  # without waiting, as in training
        state, _ = compiled(state, batch, {})
    profiler.stop(window.steps, state)


def trace_rows(trace: Trace, shares: Shares, calls: int = 1, instructions: int = 0) -> dict[str, Any]:
    """Return the times of a trace by part, for JSON, beside the prediction; a step runs the program `calls` times."""
    timeline, seconds, hardware = attribute(trace.intervals), trace.seconds / trace.steps, find_device(trace.device)
    measured = {part: time / trace.steps for part, time in timeline.parts.items()}
    exposed = timeline.exposed / trace.steps
    predicted = {} if hardware is None else predict(trace.entry, hardware, shares).parts
    names = dict.fromkeys((*measured, *(part for part in PARTS if part in predicted)))
    parts = {
        name: {"measured": round(measured.get(name, 0.0), 6), "predicted": None, "most": None, "roofline": None}
        for name in names
    }
    for name in names.keys() & predicted.keys():
        cost = predicted[name]
        ends = {"predicted": cost.seconds, "most": cost.most, "roofline": cost.roofline}
        parts[name] |= {key: round(calls * seconds, 6) for key, seconds in ends.items()}
    unattributed = round(seconds - sum(measured.values()) - exposed, 6)
    overlapped, not_predicted = timeline.overlapped / trace.steps, None if hardware else no_data_sheet(trace.device)
    warnings = _warnings(measured.get(OTHER, 0.0) / seconds, unattributed / seconds)
    rows: dict[str, Any] = {"steps": trace.steps, "seconds": round(seconds, 6), "parts": parts}
    rows |= {"exposed_collectives": round(exposed, 6), "overlapped_collectives": round(overlapped, 6)}
    rows |= {"overlap": timeline.overlap, "unattributed": unattributed, "not_predicted": not_predicted}
    return rows | {"warnings": warnings, "instructions": instruction_rows(trace, instructions)}


def configuration(
    trace: Trace, shares: Shares, calls: int, untraced: float, estimated: Sequence[Cost] = ()
) -> dict[str, Any]:
    """Return what each launch took, and each work of an estimate as a whole, for `benchmarks.gpu_report.calibration`.

    A program runs `calls` times in a step, which takes `untraced` seconds without a profiler; the profiler names what
    runs beside other work by the instruction inside. {} for a device without a data sheet.
    """
    if find_device(trace.device) is None:
        return {}
    took, rows = defaultdict[str, float](float), dict[tuple[Any, ...], dict[str, Any]]()
    for interval in trace.intervals:
        took[interval.name] += (interval.end - interval.start) / 1e9 / trace.steps
    for place, x, part, work in launched(trace.entry, shares):
        inside = place.computations.get(x.called("calls"), ()) if x.opcode.endswith("-start") else ()
        seconds = sum(took[name] for name in (x.name, *(y.name for y in inside)))
        row = rows.setdefault((part, work, seconds > 0), {**as_row(part, work), "times": 0, "seconds": 0.0})
        row["times"] += place.times * calls
        row["seconds"] += seconds
    parts = {part: time / trace.steps for part, time in attribute(trace.intervals).parts.items()}
    known = {name: sum(parts.get(part, 0.0) for part in of) for name, of in _SUMS.items()}
    known["other memory traffic"] = untraced - sum(known.values())
    measured = [x._replace(component="", kernel=x.name) for x in estimated if x.name in known]
    sums = [as_row("", work) | {"times": 1, "seconds": known[work.name]} for work in measured]
    sources = {row["kernel"]: kernel_sources(row["kernel"]) for row in (*rows.values(), *sums) if row["kernel"]}
    return {"seconds": untraced, "parts": parts, "sources": sources, "works": [*rows.values()], "sums": sums}


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


def trace_generation(
    model: ModelConfig, dtype: str, work: Work, batch: int, prompt: int, repeats: int, folder: Path
) -> tuple[Trace, float, int, int]:
    """Trace `repeats` batches of prompts, or blocks of decode steps after one, of an engine on the first device.

    Returns a trace of `Trace.steps` prompts or decode steps; the median seconds of one without the profiler; tokens of
    a prompt, rounded up to whole chunks; and how often a prompt or decode step runs the traced program, whose loop
    counts once.
    """
    options = known_options(step_options(traced=current_target().platform in GPU_PLATFORMS))
    count, new = (1, 1) if work == "prefill" else (BLOCK, (2 * repeats + 3) * BLOCK)
    prompt = prompt if prompt <= CHUNK else -(-prompt // CHUNK) * CHUNK
    if prompt + new > model.max_positions:
        length = f"{prompt} tokens of prompts, rounded up to whole chunks, and {new} new ones"
        raise InputError(f"{length} exceed model.max_positions={model.max_positions}: shorten the prompt.")
    engine = Engine(random_model(model, dtype), slots=batch, length=prompt + new, options=options)

    def submit() -> None:
        for _ in range(batch):
            engine.submit([0] * prompt, new)

    def process() -> None:
        submit()
        collections.deque(engine.updates(), maxlen=0)

    if work == "decode":
        submit()
        while not engine.step():
            pass
    call = process if work == "prefill" else engine.step
    untraced = time_calls(call, repeats).median / count
    window = StepProfiler(ProfileConfig(1, repeats), folder, lambda _: None)
    window.start(0, None, engine.compile_again(work))
    for _ in range(repeats):
        call()
    window.stop(repeats, None)
    trace = read_trace(folder / PROFILE, f"jit__{work}")
    calls = batch * -(-prompt // CHUNK) if work == "prefill" else 1
    return trace._replace(steps=repeats * count), untraced, prompt, calls


@functools.partial(jax.jit, static_argnums=(0, 1))
def random_model(config: ModelConfig, dtype: str) -> Zaya:
    """Draw a model, with parameters in the dtypes that a model which computes in `dtype` has."""
    model = Zaya(config, jax.random.key(0))
    dtypes = compute_dtypes(roles(model), dtype)
    return map_variables(model, lambda name, x: x.astype(dtypes.get(name, x.dtype)))
