"""Apply the sizing rules to each phase of a configuration."""

import dataclasses
import math
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from zaya_jax.config import Config, ModelConfig
from zaya_jax.config.stages import largest_stage
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.hardware.measurements import complete, largest_fit, read_results
from zaya_jax.lab.predict.dry_run.estimate import PhaseEstimate, estimate_phase, simulated_programs
from zaya_jax.lab.predict.dry_run.memory import local_shapes
from zaya_jax.lab.predict.dry_run.traffic import group_devices
from zaya_jax.lab.predict.sizing.rules import RULES, Finding, Measured, Sizes
from zaya_jax.parallel.mesh import nontrivial_axes


def check_sizing(config: Config, devices: int, hardware: Hardware, measured: Measured) -> dict[str, list[Finding]]:
    """Return the findings of every rule, by phase.

    Args:
      config: configuration of the run.
      devices: number of devices.
      hardware: data sheet.
      measured: on this hardware.

    Raises:
      InputError: the layout does not suit the number of devices.
    """
    return {
        phase.name: [rule(sizes) for rule in RULES]
        for index, phase in enumerate(config.phases)
        for sizes in [_sizes(config, index, devices, hardware, measured)]
    }


def _sizes(config: Config, phase: int, devices: int, hardware: Hardware, measured: Measured) -> Sizes:
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
        by_layer * mesh.shape["fsdp"] if mesh.shape["fsdp"] > 1 else 0, measured,
    )  # fmt: skip


def _fits(config: Config, phase: int, changed: Any, devices: int, hardware: Hardware) -> bool:
    """True if the phase fits with a change, by the dry run's estimate; False if the change is not allowed."""
    phases = (*config.phases[:phase], changed, *config.phases[phase + 1 :])
    try:
        programs = simulated_programs(dataclasses.replace(config, phases=phases), devices)
    except InputError:
        return False
    estimate: PhaseEstimate = estimate_phase(programs, phase, hardware)
    return estimate.memory.total <= hardware.allocatable


def read_measured(folder: str, source: str, model: ModelConfig) -> Measured:
    """Read what results of `machine collectives` and `machine gemm` in a folder say.

    Args:
      folder: with the results.
      source: flag that names it, for messages.
      model: the architecture; products of other sizes, or in another dtype than bf16, do not count.

    Raises:
      InputError: there is no such folder, or a result in it is damaged.
    """
    results, d, f = read_results(Path(folder), source), model.hidden_size, model.expert_size
    with complete(f"{source} {folder} has a result"):
        fit, gemm = largest_fit(results.get("collectives", {}), "all_gather", "knee_bytes"), results.get("gemm", {})
        rows = [row for row in gemm.get("results", ()) if "warm_flops_per_second" in row
                and gemm["dtype"] == "bfloat16"]  # fmt: skip
        experts = [row["warm_flops_per_second"] / gemm["maximum"] for row in rows
                   if row["family"] == "experts" and row["name"].endswith("even, forward")
                   and (row["columns"], row["depth"]) in ((2 * f, d), (d, f))]  # fmt: skip
        offsets = {row["offset"]: row["warm_flops_per_second"] for row in rows
                   if row["family"] == "stride" and row["depth"] - row["offset"] == d}  # fmt: skip
        others = [speed for offset, speed in offsets.items() if offset]
        return Measured(
            None if fit is None else float(fit["knee_bytes"]),
            min(experts, default=None),
            offsets[0] / statistics.median(others) if 0 in offsets and others else None,
        )
