"""Apply the sizing rules to each phase of a configuration."""

import dataclasses
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

from zaya_jax.config import Config
from zaya_jax.config.stages import largest_stage
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.machine.dry_run.estimate import PhaseEstimate, estimate_phase, simulated_programs
from zaya_jax.machine.dry_run.memory import local_shapes
from zaya_jax.machine.dry_run.traffic import group_devices
from zaya_jax.machine.sizing.rules import RULES, Finding, Sizes
from zaya_jax.parallel.mesh import nontrivial_axes


def check_sizing(config: Config, devices: int, hardware: Hardware, knee: float | None) -> dict[str, list[Finding]]:
    """Return the findings of every rule, by phase.

    Args:
      config: configuration of the run.
      devices: number of devices.
      hardware: data sheet.
      knee: bytes that saturate the network; None if not measured.

    Raises:
      InputError: the layout does not suit the number of devices.
    """
    return {
        phase.name: [rule(sizes) for rule in RULES]
        for index, phase in enumerate(config.phases)
        for sizes in [_sizes(config, index, devices, hardware, knee)]
    }


def _sizes(config: Config, phase: int, devices: int, hardware: Hardware, knee: float | None) -> Sizes:
    programs = simulated_programs(config, devices)
    estimate, program = estimate_phase(programs, phase, hardware), programs[phase]
    shape, mesh = largest_stage(config, phase), program.placement.mesh
    in_node = {}
    for axis in nontrivial_axes(mesh, tuple(mesh.shape)):
        members = Counter(device // hardware.node_size for device in group_devices((axis,), mesh.shape))
        in_node[axis] = max(members.values())
    local = local_shapes(program)
    by_layer = sum(
        math.prod(local[name]) // config.model.num_layers * program.placement.dtypes[name].itemsize
        for name, leaf in program.placement.leaves.items() if leaf.by_layer
    )  # fmt: skip
    parallel, before = config.parallel_for(config.phases[phase]), config.phases[phase]
    batch = config.batch_for(before)
    twice = dataclasses.replace(before, batch=dataclasses.replace(batch, micro_batch=2 * estimate.sequences))
    unsharded = dataclasses.replace(before, parallel=dataclasses.replace(parallel, data=None, fsdp=1))
    return Sizes(
        config.model, estimate.sequences * shape.context // mesh.shape["context"], dict(mesh.shape), in_node, hardware,
        _fits(config, phase, twice, devices, hardware) if estimate.micro_batches > 1 else None,
        _fits(config, phase, unsharded, devices, hardware) if mesh.shape["fsdp"] > 1 else None,
        by_layer * mesh.shape["fsdp"] if mesh.shape["fsdp"] > 1 else 0, knee,
    )  # fmt: skip


def _fits(config: Config, phase: int, changed: Any, devices: int, hardware: Hardware) -> bool:
    """Whether the phase fits with a change, by the dry run's estimate; not if the change is not allowed."""
    phases = (*config.phases[:phase], changed, *config.phases[phase + 1 :])
    try:
        programs = simulated_programs(dataclasses.replace(config, phases=phases), devices)
    except InputError:
        return False
    estimate: PhaseEstimate = estimate_phase(programs, phase, hardware)
    return estimate.memory.total <= hardware.allocatable


def measured_knee(path: str) -> float:
    """Return the saturation point of all-gathers over the most devices, from a file of `machine collectives`.

    Raises:
      InputError: the file is no such file.
    """
    try:
        fits = json.loads(Path(path).read_text(encoding="utf-8"))["fits"]
        gathers = [fit for fit in fits if fit["operation"] == "all_gather" and "knee_bytes" in fit]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"--measured {path} is no result of machine collectives --output: {error}.") from error
    if not gathers:
        raise InputError(
            f"--measured {path} has no fit of all_gather. Measure more sizes, with --operations all_gather."
        )
    return float(max(gathers, key=lambda fit: fit["devices"])["knee_bytes"])


def lines(findings: dict[str, list[Finding]]) -> list[str]:
    """Return the lines of the report: a table for each phase."""
    report = []
    for phase, found in findings.items():
        report += [f"Phase {phase}", f"  {'':<5}{'rule':<30}{'loss':>6}  value"]
        for finding in found:
            loss = "–" if finding.loss is None else f"{finding.loss:.0%}"
            advice = f" → {finding.advice}" if finding.advice else ""
            report.append(f"  {finding.status:<5}{finding.rule:<30}{loss:>6}  {finding.value}{advice}")
        report.append("")
    return report
