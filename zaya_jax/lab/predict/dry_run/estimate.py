"""Estimate a phase: memory, FLOPs, communication, and the time of a step."""

import math
from collections.abc import Mapping
from typing import NamedTuple

from zaya_jax.config import Config, ModelConfig
from zaya_jax.config.parallel import Reduce
from zaya_jax.config.phases import Remat
from zaya_jax.config.stages import largest_stage
from zaya_jax.hardware.assumptions import ASSUMPTIONS, Assumptions
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.lab.predict.dry_run.memory import (
    CountActivations,
    Memory,
    count_activations,
    estimate_memory,
    local_shapes,
)
from zaya_jax.lab.predict.dry_run.traffic import Transfer, seconds, transfers
from zaya_jax.model.arithmetic import attention_flops_per_token, newton_schulz_flops, prefill_flops_per_token
from zaya_jax.ops.registry import KernelSelection, select_kernels
from zaya_jax.ops.target import Target
from zaya_jax.optim.build import OPTIMIZERS
from zaya_jax.parallel.mesh import batch_shards
from zaya_jax.train.program import Programs

TARGET = Target("rocm", "gfx942", "gfx942")  # its kernels are traced, but not compiled


DATA_SHEET_SPEED = ASSUMPTIONS._replace(matmul=1.0, kernel=1.0)


class PhaseEstimate(NamedTuple):
    """The estimate of a phase."""

    phase: str  # name of the phase
    axes: dict[str, int]  # number of devices along each mesh axis
    sequences: int  # sequences of a micro-batch on one device
    micro_batches: int  # micro-batches of the phase's largest step
    tokens: int  # tokens of that step
    steps: int  # number of steps of the phase at that size
    remat: Remat  # rematerialization policy
    reduce: Reduce  # when gradients are reduced over devices
    memory: Memory  # bytes of one device
    # FLOPs of a step on all devices, without recomputation: of the head, of attention's scores and values, of the rest
    # of the model, and of Newton–Schulz
    flops: dict[str, float]
    transfers: list[Transfer]  # what a device sends in a step
    # lower bounds of the step time in seconds, by compute, memory and network; {} without hardware
    bounds: dict[str, float]
    keys: dict[str, str]  # keys of the configuration that set the phase's `batch`, `remat` and `parallel` layout
    seconds: dict[str, float]  # estimated time of a step by component, with `hardware.assumptions`; {} without hardware

    @property
    def step_seconds(self) -> float | None:
        """Estimated time of a step; None without hardware."""
        return sum(self.seconds.values()) if self.seconds else None


def simulated_programs(config: Config, devices: int, kernels: KernelSelection | None = None) -> Programs:
    """Make the programs of a run on `devices` abstract devices, with given `kernels` or those of `TARGET`.

    Raises:
      InputError: the product of the mesh axes is not `devices`, or a batch does not divide over them.
    """
    kernels = kernels or select_kernels(TARGET, config.model, config.train.compute_dtype, None, config.ops)
    programs = Programs(config, kernels, devices)
    programs.check()
    return programs


def estimate_phase(
    programs: Programs, phase: int, hardware: Hardware | None, count: CountActivations = count_activations
) -> PhaseEstimate:
    """Estimate a phase.

    Args:
      programs: of the run, on the devices to estimate for.
      phase: index of the phase.
      hardware: data sheet or measurements, needed for times.
      count: `memory.count_activations`, or a table of it.
    """
    config, program = programs.config, programs[phase]
    phase_config, sizes, devices = config.phases[phase], program.placement.mesh.shape, program.placement.mesh.size
    stage = largest_stage(config, phase)
    micro_batches, sequences, _ = program.batch_shape(stage)
    sequences //= batch_shards(program.placement.mesh)
    memory = estimate_memory(program, sequences, stage.context, micro_batches, count)
    tokens = stage.sequences * stage.context
    split = config.optimizer.muon.gate_up == "split"
    rounds = config.optimizer.muon.newton_schulz_steps * OPTIMIZERS[config.matrices].newton_schulz
    flops = {
        **{part: tokens * count
           for part, count in model_flops(config.model, stage.context, config.lora is not None).items()},
        "newton_schulz": newton_schulz_flops(config.model, rounds, split, {}),
    }  # fmt: skip
    repeats = {name: devices // math.prod(sizes[axis] for axis in leaf.split)
               for name, leaf in program.placement.leaves.items()}  # fmt: skip
    executed = {**flops, "newton_schulz": newton_schulz_flops(config.model, rounds, split, repeats)}
    moved = transfers(program, local_shapes(program), sequences, stage.context, micro_batches)
    bounds, times = {}, {}
    if hardware is not None:
        traffic, reached = _least_traffic(memory, micro_batches), hardware.reached
        bounds = {
            "compute": _compute_seconds(executed, "none", config, hardware, DATA_SHEET_SPEED) / devices,
            "memory": traffic / hardware.bandwidth,
            "network": seconds(moved, sizes, hardware),
        }
        hidden, exposed = ([transfer for transfer in moved if transfer.hidden == x] for x in (True, False))
        times = {
            "matmuls and kernels": _compute_seconds(executed, program.remat, config, hardware, reached) / devices,
            "other memory traffic": reached.traffic * traffic / hardware.bandwidth / reached.memory,
            "kernel launches": micro_batches * config.model.num_layers * reached.layer_launches * reached.launch,
        }
        behind = max(0.0, seconds(hidden, sizes, hardware, hardware.links) - sum(times.values()))
        times["exposed network"] = seconds(exposed, sizes, hardware, hardware.links) + behind
    remat_key = "train" if phase_config.remat is None else config.phase_key(phase)
    keys = {"batch": config.batch_key(phase_config), "remat": f"{remat_key}.remat",
            "parallel": config.parallel_key(phase_config)}  # fmt: skip
    steps, reduce = math.ceil(phase_config.tokens / tokens), program.placement.config.gradient_reduction
    return PhaseEstimate(phase_config.name, dict(sizes), sequences, micro_batches, tokens, steps, program.remat, reduce,
                         memory, flops, moved, bounds, keys, times)  # fmt: skip


def _compute_seconds(
    flops: Mapping[str, float], remat: Remat, config: Config, hardware: Hardware, reached: Assumptions
) -> float:
    """Return the time of all matmuls and kernels on one device."""
    low = config.train.compute_dtype == "bfloat16"
    peak = hardware.peak if low else hardware.fp32_peak
    of_optimizer = hardware.peak if config.optimizer.muon.newton_schulz_dtype == "bfloat16" and low else peak
    layers = (flops["attention"] + flops["rest"]) * (4 / 3 if remat == "full" else 1)
    return (
        layers / peak / reached.kernel + (flops["head"] / peak + flops["newton_schulz"] / of_optimizer) / reached.matmul
    )


def model_flops(config: ModelConfig, context: int, frozen_head: bool = False) -> dict[str, float]:
    """Count the training FLOPs per token by part; the sum is `model.arithmetic.training_flops_per_token`."""
    body, attention = prefill_flops_per_token(config, context, head=False), attention_flops_per_token(config, context)
    head = prefill_flops_per_token(config, context) - body
    return {"head": (2 if frozen_head else 3) * head, "attention": 3 * attention, "rest": 3 * (body - attention)}


def _least_traffic(memory: Memory, micro_batches: int) -> float:
    """Return a lower bound of the bytes that a step reads and writes on a device.

    Master weights and moments are read and written once. For each micro-batch the compute copy (or the stored
    parameters, without a copy) is read in both passes, gradients are accumulated, and activations are written and read.
    """
    computed = max(memory.compute, memory.parameters + memory.frozen)
    per_micro_batch = 2 * (computed + memory.gradients + memory.activations)
    return 2 * (memory.parameters + memory.optimizer) + micro_batches * per_micro_batch


def advice(estimate: PhaseEstimate, hardware: Hardware) -> list[str]:
    """Return changes that reduce the memory of a phase that does not fit, cheapest first."""
    memory, keys, changes = estimate.memory, estimate.keys, []
    available = hardware.allocatable - memory.frozen - memory.parameters - memory.optimizer
    if memory.update <= available:  # otherwise only sharding the state further helps
        if estimate.sequences > 1:
            changes.append(f"{keys['batch']}.micro_batch below {estimate.sequences}")
        if estimate.remat != "full":
            changes.append(f"{keys['remat']}=full")
        if estimate.reduce == "step" and math.prod(estimate.axes.values()) > 1:
            changes.append(f"{keys['parallel']}.gradient_reduction=micro_batch")
        if estimate.axes["data"] > 1:
            changes += [f"a larger {keys['parallel']}.fsdp", f"a larger {keys['parallel']}.context"]
    return [*changes, "more devices"]


def speedups(estimate: PhaseEstimate, memory: int, hardware: Hardware) -> list[str]:
    """Return changes that use the free memory of a phase that fits, or that lower its exposed network time."""
    free, keys, changes = hardware.allocatable - memory, estimate.keys, []
    if estimate.micro_batches > 1 and free > estimate.memory.activations:
        changes.append(f"{keys['batch']}.micro_batch above {estimate.sequences}")
    if estimate.remat == "full" and free > estimate.memory.activations:
        changes.append(f"{keys['remat']}=dots")
    if estimate.seconds.get("exposed network", 0.0) > 0.2 * sum(estimate.seconds.values()):
        exposed = [transfer for transfer in estimate.transfers if not transfer.hidden]
        axes = max(exposed, key=lambda transfer: transfer.bytes).axes
        inner = [axis for axis in axes if axis != "data"]
        changes.append(f"a smaller {keys['parallel']}.{inner[-1]}" if inner else f"a larger {keys['batch']}.tokens")
    return [*changes, "--suggest, which compares such settings"] if changes else []
