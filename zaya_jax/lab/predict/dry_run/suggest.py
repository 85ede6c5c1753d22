"""Search layouts, rematerialization policies and micro-batches for the fastest step of a phase that fits."""

import dataclasses
import itertools
import json
import shlex
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

from zaya_jax.config import Config, ParallelConfig, PhaseConfig, to_dict
from zaya_jax.config.phases import Remat
from zaya_jax.config.stages import largest_stage
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.lab.predict.compilers.compiled import compile_step
from zaya_jax.lab.predict.compilers.predict import phase_shares, predict
from zaya_jax.lab.predict.dry_run.estimate import TARGET, PhaseEstimate, estimate_phase, simulated_programs
from zaya_jax.lab.predict.dry_run.memory import Activations, count_activations, residual_bytes
from zaya_jax.ops.registry import KernelSelection, select_kernels
from zaya_jax.run.progress import track
from zaya_jax.train.program import PhaseProgram

LISTED, COMPILED = 6, 3  # settings
LONG = 32768  # tokens of a sequence from which on it may be worth splitting


class Suggestion(NamedTuple):
    """A change of a phase."""

    config: Config  # the configuration with the change
    overrides: tuple[str, ...]  # the change, as arguments of the command; () for none
    estimate: PhaseEstimate  # estimate of the phase


def suggest(config: Config, phase: int, devices: int, hardware: Hardware) -> list[Suggestion]:
    """Return all settings of a phase that are estimated to fit, from the fastest.

    The search covers the sizes of the axes `fsdp`, `expert` and (for sequences of at least `LONG` tokens) `context`
    within a node, every `remat`, and micro-batches in powers of two. If nothing fits, it repeats with axes over nodes
    and with `gradient_reduction: micro_batch`.

    Args:
      config: configuration of the run.
      phase: index of the phase.
      devices: number of devices.
      hardware: data sheet.
    """
    table = ActivationTable()
    kernels = select_kernels(TARGET, config.model, config.train.compute_dtype, None, config.ops)
    for across_nodes in (False, True):
        layouts = list(find_layouts(config, phase, devices, hardware.node_size, across_nodes))
        fitting = [
            suggestion
            for parallel in track("trying", layouts, _describe)
            for suggestion in _fitting(config, phase, devices, hardware, parallel, table, kernels)
        ]
        if fitting:
            return sorted(fitting, key=lambda suggestion: sum(suggestion.estimate.seconds.values()))
    return []


def _describe(parallel: ParallelConfig) -> str:
    sizes = {axis: getattr(parallel, axis) for axis in ("fsdp", "expert", "context")}
    return " × ".join(f"{axis} {size}" for axis, size in sizes.items() if size > 1) or "data"


def find_layouts(config: Config, phase: int, devices: int, node: int, across_nodes: bool) -> Iterator[ParallelConfig]:
    """Yield the layouts that `suggest` compares.

    Args:
      config: configuration of the run.
      phase: index of the phase.
      devices: number of devices.
      node: devices of a node.
      across_nodes: whether an axis may span nodes; each micro-batch then reduces its gradients.
    """
    now = config.parallel_for(config.phases[phase])
    divisors = [size for size in range(1, devices + 1) if devices % size == 0]
    inside = [size for size in divisors if size <= node]
    experts = [size for size in inside if config.model.num_experts % size == 0]
    contexts = inside if across_nodes or config.context_for(config.phases[phase]) >= LONG else [1]
    for fsdp, expert, context in itertools.product(divisors if across_nodes else inside, experts, contexts):
        if devices % (fsdp * expert * context) == 0:
            yield dataclasses.replace(
                now, data=None, fsdp=fsdp, expert=expert, context=context,
                gradient_reduction="micro_batch" if across_nodes else now.gradient_reduction,
                expert_exchange="ragged" if expert > 1 else now.expert_exchange,
            )  # fmt: skip


def _fitting(
    config: Config, phase: int, devices: int, hardware: Hardware, parallel: ParallelConfig, table: "ActivationTable",
    kernels: KernelSelection,
) -> Iterator[Suggestion]:  # fmt: skip
    """Yield what fits of a layout; of each policy the micro-batches until one does not fit."""
    for remat in get_args(Remat):
        for micro_batch in micro_batch_sizes(config, phase, devices // parallel.context):
            changed = with_settings(config, phase, parallel, remat, micro_batch)
            try:
                changed.check()
                programs = simulated_programs(single_phase(changed, phase), devices, kernels)
            except InputError:
                continue  # a smaller stage of a batch ramp may divide into larger micro-batches only
            estimate = estimate_phase(programs, 0, hardware, table)
            if estimate.memory.total > hardware.allocatable:
                break
            yield Suggestion(changed, overrides(config, config.phases[phase], changed.phases[phase]), estimate)


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


def overrides(config: Config, before: PhaseConfig, after: PhaseConfig) -> tuple[str, ...]:
    """Return the arguments of the command that change a phase's layout, remat and micro-batch, and no other phase's."""
    where, alone = config.phase_key(config.phases.index(before)), len(config.phases) == 1
    changes = list[str]()
    for name, old, new in (("parallel", config.parallel_for(before), after.parallel),
                           ("batch", config.batch_for(before), after.batch)):  # fmt: skip
        changed = differences(old, new)
        if getattr(before, name) is not None or alone:
            key = {"parallel": config.parallel_key, "batch": config.batch_key}[name](before)
            changes += [f"{key}.{field}={_yaml(value)}" for field, value in changed.items()]
        elif changed:  # a section of the phase's own, which names all that differs from the defaults
            changes.append(f"{where}.{name}={_yaml(differences(type(old)(), new))}")
    if config.remat_for(before) != after.remat:
        changes.append(f"{'train' if alone and before.remat is None else where}.remat={after.remat}")
    return tuple(changes)


def differences(old: Any, new: Any) -> dict[str, Any]:
    """Return the values of `new` that differ from `old`, as in YAML, by key."""
    values = to_dict(new)
    return {field.name: values[field.name] for field in dataclasses.fields(old)
            if getattr(old, field.name) != getattr(new, field.name)}  # fmt: skip


def _yaml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def suggestions(config: Config, phase: int, devices: int, hardware: Hardware, gpu: str | None) -> list[dict[str, Any]]:
    """Describe the `LISTED` fastest settings of a phase; compiled for `gpu` the `COMPILED` fastest of them.

    Returns:
      The `overrides` of each, estimated `seconds` of a step and `bytes` of a device; what the compiler and its
      prediction say instead if `compiled`; whether it `fits`; and why the compiler `refused` it. Those that fit are
      first, the fastest of them before all.
    """
    rows = []
    fastest = suggest(config, phase, devices, hardware)[:LISTED]
    for index, suggestion in enumerate(track("comparing", fastest, lambda x: " ".join(x.overrides))):
        estimate, compiled = suggestion.estimate, gpu is not None and index < COMPILED
        row = {"overrides": suggestion.overrides, "seconds": sum(estimate.seconds.values()),
               "bytes": estimate.memory.total, "compiled": compiled, "refused": ""}  # fmt: skip
        if gpu is not None and compiled:
            try:
                step = compile_step(suggestion.config, phase, gpu, devices)
            except InputError as error:
                row["refused"] = str(error)
            else:
                shares = phase_shares(config.model, config.context_for(config.phases[phase]), estimate.axes)
                row |= {"seconds": predict(step.entry, hardware, shares).seconds, "bytes": step.peak_memory}
        row["fits"] = not row["refused"] and row["bytes"] <= hardware.allocatable
        rows.append(row)
    return sorted(rows, key=lambda row: (not row["fits"], not row["compiled"], row["seconds"]))


def suggestion_lines(phase: str, rows: list[dict[str, Any]]) -> list[str]:
    """Return the lines of the report on what `suggestions` found."""
    if not rows:
        return [f"No layout, remat and micro-batch of phase {phase} is estimated to fit."]
    lines = [f"Fastest settings of phase {phase}", f"  {'s/step':>8} {'GB':>7}  source     change"]
    for row in rows:
        source = "compiled" if row["compiled"] else "estimated"
        change = " ".join(map(shlex.quote, row["overrides"])) or "none"
        if not row["fits"]:
            change += f" ({row['refused'] or 'does not fit'})"
        lines.append(f"  {row['seconds']:8.3g} {row['bytes'] / 1e9:7.1f}  {source:<9}  {change}")
    return lines


class ActivationTable:
    """Counts a model's activations of 1 and of 2 sequences, and extrapolates: they grow linearly.

    It is called as `memory.count_activations`, and counts each layout and policy once.
    """

    def __init__(self) -> None:
        self.counted: dict[Any, tuple[Activations, ...]] = {}
        self.residuals: dict[Any, int] = {}

    def __call__(self, program: PhaseProgram, sequences: int, context: int) -> Activations:
        """Return the activations of `sequences` of `context` tokens."""
        key = self._key(program, context)
        if key not in self.counted:
            self.counted[key] = tuple(count_activations(program, count, context, self._residuals) for count in (1, 2))
        one, two = self.counted[key]
        return Activations(*(low + (sequences - 1) * (high - low) for low, high in zip(one, two, strict=True)))

    def _residuals(self, program: PhaseProgram, sequences: int, context: int) -> int:
        """Count residuals once per model: the layers that are recomputed do not depend on the policy."""
        key = (*self._key(program, context), program.config.model.num_layers, sequences)
        if key not in self.residuals:
            self.residuals[key] = residual_bytes(program, sequences, context)
        return self.residuals[key]

    def _key(self, program: PhaseProgram, context: int) -> tuple[Any, ...]:
        parallel = program.placement.config
        return program.remat, parallel.expert, parallel.context, parallel.fsdp > 1, context
