"""Apply the sizing rules to each phase of a configuration."""

import dataclasses
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

from zaya_jax.config import Config, ModelConfig
from zaya_jax.config.stages import largest_stage
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.hardware.measurements import complete, largest_fit, read_results
from zaya_jax.lab.predict.dry_run.estimate import estimate_phase, simulated_programs
from zaya_jax.lab.predict.dry_run.memory import local_copies
from zaya_jax.lab.predict.dry_run.traffic import group_devices
from zaya_jax.lab.predict.sizing.rules import RULES, Finding, Measured, Sizes
from zaya_jax.parallel.mesh import nontrivial_axes


def check_sizing(config: Config, devices: int, hardware: Hardware, measured: Measured) -> dict[str, list[Finding]]:
    """Return the findings of every rule, by phase, with what was measured on the `hardware`.

    Raises:
      InputError: the layout does not suit the number of devices.
    """
    findings = {}
    for index, phase in enumerate(config.phases):
        sizes = _sizes(config, index, devices, hardware, measured)
        findings[phase.name] = [rule(sizes) for rule in RULES]
    return findings


def _sizes(config: Config, index: int, devices: int, hardware: Hardware, measured: Measured) -> Sizes:
    programs, phase = simulated_programs(config, devices), config.phases[index]
    estimate, program = estimate_phase(programs, index, hardware), programs[index]
    mesh, local, layers = program.placement.mesh, local_copies(program), config.model.num_layers
    sharded = mesh.shape["fsdp"] > 1
    in_node = {}
    for axis in nontrivial_axes(mesh, tuple(mesh.shape)):
        members = Counter(device // hardware.node_size for device in group_devices((axis,), mesh.shape))
        in_node[axis] = max(members.values())
    by_layer = [name for name, leaf in program.placement.leaves.items() if leaf.by_layer]
    shard = sum(local[name].size // layers * program.placement.dtypes[name].itemsize for name in by_layer)

    def fits(**changes: Any) -> bool:
        """True if the phase fits with a change, by the dry run's estimate; False if the change is not allowed."""
        phases = (*config.phases[:index], dataclasses.replace(phase, **changes), *config.phases[index + 1 :])
        try:
            changed = simulated_programs(dataclasses.replace(config, phases=phases), devices)
        except InputError:
            return False
        return estimate_phase(changed, index, hardware).memory.total <= hardware.allocatable

    twice = dataclasses.replace(config.batch_for(phase), micro_batch=2 * estimate.sequences)
    unsharded = dataclasses.replace(config.parallel_for(phase), data=None, fsdp=1)
    return Sizes(
        model=config.model,
        tokens=estimate.sequences * largest_stage(config, index).context // mesh.shape["context"],
        axes=dict(mesh.shape),
        in_node=in_node,
        hardware=hardware,
        fits_twice=fits(batch=twice) if estimate.micro_batches > 1 else None,
        fits_unsharded=fits(parallel=unsharded) if sharded else None,
        message=shard * mesh.shape["fsdp"] if sharded else 0,
        measured=measured,
    )


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
        experts, offsets = [], {}
        for row in gemm.get("results", ()):
            if "warm_flops_per_second" not in row or gemm["dtype"] != "bfloat16":
                continue
            speed, family, depth = row["warm_flops_per_second"], row["family"], row["depth"]
            even = family == "experts" and row["name"].endswith("even, forward")
            if even and (row["columns"], depth) in ((2 * f, d), (d, f)):
                experts.append(speed / gemm["maximum"])
            if family == "stride" and depth - row["offset"] == d:
                offsets[row["offset"]] = speed
        others = [speed for offset, speed in offsets.items() if offset]
        return Measured(
            knee=None if fit is None else float(fit["knee_bytes"]),
            experts=min(experts, default=None),
            stride=offsets[0] / statistics.median(others) if 0 in offsets and others else None,
        )
