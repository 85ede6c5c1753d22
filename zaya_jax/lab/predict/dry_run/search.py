"""Search layouts, rematerialization policies and micro-batches for the fastest steps of a phase that fit.

To count activations, an estimate traces a step, which takes seconds. The search leaves out only what a lower bound of
the step's time proves to be slower:

1. The time and the memory of a step grow with its activations. With `least_activations` in place of those counted, the
   estimates are lower bounds.
2. A layout and policy with several micro-batches is no slower with larger ones: a step then launches fewer kernels, and
   reads its parameters and updates its gradients less often. The same holds for its lower bound.
3. The time of the matrix products is the same for all layouts and micro-batches.
"""

import dataclasses
import functools
import itertools
import json
import shlex
from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import Any, NamedTuple, TypeVar, get_args

import jax.numpy as jnp

from zaya_jax.config import Config, ParallelConfig, to_dict
from zaya_jax.config.phases import Remat
from zaya_jax.config.stages import largest_stage
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.lab.predict.compilers.compiled import compile_step
from zaya_jax.lab.predict.compilers.compiled_report import section
from zaya_jax.lab.predict.compilers.predict import phase_shares, predict
from zaya_jax.lab.predict.dry_run.estimate import TARGET, PhaseEstimate, estimate_phase, simulated_programs
from zaya_jax.lab.predict.dry_run.memory import Activations, count_activations, residual_bytes
from zaya_jax.lab.predict.step_time import span
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.ops.registry import pins_on, select_kernels
from zaya_jax.run.progress import track
from zaya_jax.run.table import number
from zaya_jax.train.program import PhaseProgram, Programs

LISTED, COMPILED = 6, 3  # settings
LONG = 32768  # tokens of a sequence from which on it may be worth splitting
T = TypeVar("T")


class Candidate(NamedTuple):
    """Settings of a phase, with which it may fit."""

    config: Config  # the configuration with the settings
    programs: Programs  # of a run of that phase alone
    seconds: float  # lower bound of a step


class Suggestion(NamedTuple):
    """Settings of a phase, with which it is estimated to fit."""

    config: Config  # the configuration with the settings
    estimate: PhaseEstimate  # estimate of the phase


def suggest(config: Config, phase: int, devices: int, hardware: Hardware, count: int = LISTED) -> list[Suggestion]:
    """Return the `count` settings of a phase with the fastest steps, from the fastest.

    The search covers the sizes of the axes `fsdp`, `expert` and (for sequences of at least `LONG` tokens) `context`
    within a node, every `remat`, and micro-batches in powers of two. If nothing fits, it repeats with axes over nodes
    and with `gradient_reduction: micro_batch`.
    """
    for across_nodes in (False, True):
        layouts = list(find_layouts(config, phase, devices, hardware.node_size, across_nodes))
        found = candidates(config, phase, devices, hardware, track("bounding", layouts, _describe))
        tried = track("trying", found, lambda candidate: _describe(candidate.config.phases[phase].parallel))
        if fitting := fastest(tried, hardware, count):
            return sorted(fitting, key=lambda suggestion: sum(suggestion.estimate.seconds.values()))[:count]
    return []


def _describe(parallel: ParallelConfig | None) -> str:
    sizes = {axis: getattr(parallel, axis) for axis in ("fsdp", "expert", "context")}
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "data"


def find_layouts(config: Config, phase: int, devices: int, node: int, across_nodes: bool) -> Iterator[ParallelConfig]:
    """Yield layouts for `suggest`: within nodes of `node` devices, or across, where micro-batches reduce gradients."""
    now = config.parallel_for(config.phases[phase])
    if across_nodes:
        now = dataclasses.replace(now, gradient_reduction="micro_batch")
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    inside = [size for size in divisors if size <= node]
    experts = [size for size in inside if config.model.num_experts % size == 0]
    contexts = inside if across_nodes or config.context_for(config.phases[phase]) >= LONG else [1]
    for fsdp, expert, context in itertools.product(divisors if across_nodes else inside, experts, contexts):
        if devices % (fsdp * expert * context) == 0:
            exchange = "ragged" if expert > 1 else now.expert_exchange
            sizes = {"data": None, "fsdp": fsdp, "expert": expert, "context": context}
            yield dataclasses.replace(now, **sizes, expert_exchange=exchange)


def candidates(
    config: Config, phase: int, devices: int, hardware: Hardware, layouts: Iterable[ParallelConfig], limit: float = inf
) -> list[Candidate]:
    """Return layouts, policies and micro-batches (powers of two) that may fit in `limit` seconds, by their bounds."""
    pinned = pins_on(TARGET.platform, config.ops)
    kernels = select_kernels(TARGET, config.model, config.train.compute_dtype, None, pinned)
    context, found, products = config.context_for(config.phases[phase]), list[Candidate](), dict[Remat, float]()
    for parallel, remat in itertools.product(layouts, get_args(Remat)):
        for micro_batch in reversed(micro_batch_sizes(config, phase, devices // parallel.context)):
            kept = _least_bytes(config, remat, micro_batch * context // parallel.context)
            if products.get(remat, 0.0) > limit or kept > hardware.allocatable:
                continue
            changed = with_settings(config, phase, parallel, remat, micro_batch)
            try:
                changed.check()
                programs = simulated_programs(single_phase(changed, phase), devices, kernels)
            except InputError:
                continue  # a smaller stage of a batch ramp may divide into larger micro-batches only
            bound = estimate_phase(programs, 0, hardware, least_activations)
            seconds, products[remat] = sum(bound.seconds.values()), bound.seconds["matmuls and kernels"]
            if seconds <= limit and bound.memory.total <= hardware.allocatable:
                found.append(Candidate(changed, programs, seconds))
            elif seconds > limit and bound.micro_batches > 1:
                break
    return sorted(found, key=lambda candidate: candidate.seconds)


def fastest(found: Iterable[Candidate], hardware: Hardware, count: int = 1, limit: float = inf) -> list[Suggestion]:
    """Return candidates that fit in at most `limit` seconds a step, each no slower than the best `count` before it."""
    fitting, times, table = list[Suggestion](), list[float](), ActivationTable()
    for candidate in found:
        if candidate.seconds > limit:
            break
        estimate = estimate_phase(candidate.programs, 0, hardware, table)
        seconds = sum(estimate.seconds.values())
        if seconds <= limit and estimate.memory.total <= hardware.allocatable:
            fitting.append(Suggestion(candidate.config, estimate))
            times = sorted([*times, seconds])[:count]
            limit = times[-1] if len(times) == count else limit
    return fitting


def micro_batch_sizes(config: Config, phase: int, shards: int) -> list[int]:
    """Return the powers of two that divide a shard's sequences of the phase's largest step; [] if `shards` do not."""
    most, rest = divmod(largest_stage(config, phase).sequences, shards)
    return [] if rest else [2**power for power in range(most.bit_length()) if most % 2**power == 0]


def with_settings(config: Config, phase: int, parallel: ParallelConfig, remat: Remat, micro_batch: int) -> Config:
    """Return the configuration with another layout, rematerialization policy and micro-batch in a phase."""
    before = config.phases[phase]
    batch = dataclasses.replace(config.batch_for(before), micro_batch=micro_batch)
    after = dataclasses.replace(before, parallel=parallel, remat=remat, batch=batch)
    return dataclasses.replace(config, phases=(*config.phases[:phase], after, *config.phases[phase + 1 :]))


def single_phase(config: Config, phase: int) -> Config:
    """Return a run of one phase, which keeps its schedule: the programs of others take time to make."""
    schedule = next(x.schedule for x in reversed(config.phases[: phase + 1]) if x.schedule or x is config.phases[0])
    return dataclasses.replace(config, phases=(dataclasses.replace(config.phases[phase], schedule=schedule),))


def overrides(config: Config, phase: int, changed: Config) -> tuple[str, ...]:
    """Return the arguments of the command that change the model, and layout, remat and micro-batch of one phase."""
    before, after, alone = config.phases[phase], changed.phases[phase], len(config.phases) == 1
    where, changes = config.phase_key(phase), _assignments("model", config.model, changed.model)
    sections = (
        ("parallel", config.parallel_key(before), config.parallel_for(before)),
        ("batch", config.batch_key(before), config.batch_for(before)),
    )
    for name, key, old in sections:
        new = getattr(after, name)
        if getattr(before, name) is not None or alone:
            changes += _assignments(key, old, new)
        elif old != new:  # a section of the phase's own, which names all that differs from the defaults
            changes.append(f"{where}.{name}={json.dumps(_differences(type(old)(), new))}")
    if config.remat_for(before) != after.remat:
        changes.append(f"{'train' if alone and before.remat is None else where}.remat={after.remat}")
    return tuple(changes)


def _assignments(key: str, old: Any, new: Any) -> list[str]:
    values = {name: x if isinstance(x, str) else json.dumps(x) for name, x in _differences(old, new).items()}
    return [f"{key}.{name}={value}" for name, value in values.items()]


def _differences(old: Any, new: Any) -> dict[str, Any]:
    """Return the values of `new` that differ from `old`, as in YAML, by key."""
    changed = (field.name for field in dataclasses.fields(old))
    return {name: to_dict(new)[name] for name in changed if getattr(old, name) != getattr(new, name)}


def suggestions(config: Config, phase: int, devices: int, hardware: Hardware, gpu: str | None) -> list[dict[str, Any]]:
    """Describe the `LISTED` fastest settings of a phase; compiled for `gpu` the `COMPILED` fastest of them.

    Each has its `overrides`, estimated `seconds` of a step and `bytes` of a device, or the compiler's if `compiled`;
    whether it `fits`; and why the compiler `refused` it. Those that fit are first, the fastest of them before all.
    """
    rows = []
    found = [(x, overrides(config, phase, x.config)) for x in suggest(config, phase, devices, hardware)]
    for index, (suggestion, change) in enumerate(track("comparing", found, lambda item: " ".join(item[1]))):
        estimate, compiled = suggestion.estimate, gpu is not None and index < COMPILED
        row = {"overrides": change, "seconds": estimate.step_seconds, "most": estimate.most_seconds}
        row |= {"bytes": estimate.memory.total, "compiled": compiled, "refused": ""}
        if gpu is not None and compiled:
            try:
                step = compile_step(suggestion.config, phase, gpu, devices)
            except InputError as error:
                row["refused"] = str(error)
            else:
                shares = phase_shares(config.model, config.context_for(config.phases[phase]), estimate.axes)
                predicted = predict(step.entry, hardware, shares)
                row |= {"seconds": predicted.seconds, "most": predicted.most, "bytes": step.peak_memory}
        row["fits"] = not row["refused"] and row["bytes"] <= hardware.allocatable
        rows.append(row)
    return sorted(rows, key=lambda row: (not row["fits"], not row["compiled"], row["seconds"]))


def suggestion_lines(phase: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the report on what `suggestions` found."""
    if not rows:
        return [f"No layout, remat and micro-batch of phase {phase} is estimated to fit."]
    cells = []
    for row in rows:
        source, wrong = "compiled" if row["compiled"] else "estimated", f" ({row['refused'] or 'does not fit'})"
        change = " ".join(map(shlex.quote, row["overrides"])) or "none"
        size = number(row["bytes"], 1e9)
        seconds = span((row["seconds"], row["most"]), number)
        cells.append((seconds, size, source, change + ("" if row["fits"] else wrong)))
    return section(f"Fastest settings of phase {phase}", ("s/step", "GB", "source", "change"), cells, indent="")


def least_activations(program: PhaseProgram, sequences: int, context: int) -> Activations:
    """Return a lower bound of `memory.count_activations`."""
    tokens = sequences * context // program.placement.mesh.shape["context"]
    return Activations(_least_bytes(program.config, program.remat, tokens), 0)


def _least_bytes(config: Config, remat: Remat, tokens: int) -> int:
    """Return a lower bound of the bytes that the layers keep of `tokens` tokens for the backward pass.

    Each keeps its input from the residual stream, and with all policies but `full`, unless adapters' frozen matrices
    need no inputs, the outputs of attention, its two projections and the two products of an expert.
    """
    model, dtype = config.model, config.train.compute_dtype
    kept = model.hidden_size * accumulation_dtype(dtype).itemsize
    if remat != "full" and config.lora is None:
        products = 2 * (model.query_size + model.kv_size + model.hidden_size + model.expert_size)
        kept += products * jnp.dtype(dtype).itemsize
    return model.num_layers * tokens * kept


class ActivationTable:
    """Counts a model's activations of 1 and of 2 sequences, once for each layout and policy, and extrapolates."""

    def __init__(self) -> None:
        self.known: dict[Any, Any] = {}

    def __call__(self, program: PhaseProgram, sequences: int, context: int) -> Activations:
        """Return the activations of `sequences` of `context` tokens."""
        # Residuals are counted once per model, too: the layers that are recomputed do not depend on the policy.
        residuals = functools.partial(self._once, residual_bytes)
        one, two = (self._once(count_activations, program, count, context, residuals=residuals) for count in (1, 2))
        return Activations(*(low + (sequences - 1) * (high - low) for low, high in zip(one, two, strict=True)))

    def _once(self, count: Callable[..., T], program: PhaseProgram, sequences: int, context: int, **options: Any) -> T:
        parallel, layers = program.placement.config, program.config.model.num_layers
        layout = program.remat, parallel.expert, parallel.context, parallel.fsdp > 1
        key = (count, *layout, layers, sequences, context)
        if key not in self.known:
            self.known[key] = count(program, sequences, context, **options)
        return self.known[key]
