"""Estimate a phase: memory, FLOPs, communication, and lower bounds of the step time."""

import math
from typing import NamedTuple

from zaya_jax.config import Config, ModelConfig
from zaya_jax.config.parallel import Reduce
from zaya_jax.config.phases import Remat
from zaya_jax.config.stages import BatchStage, stages
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.machine.dry_run.memory import Memory, estimate_memory, local_shapes
from zaya_jax.machine.dry_run.traffic import Transfer, seconds, transfers
from zaya_jax.model.arithmetic import attention_flops_per_token, newton_schulz_flops, prefill_flops_per_token
from zaya_jax.ops.registry import select_kernels
from zaya_jax.ops.target import Target
from zaya_jax.optim.build import OPTIMIZERS
from zaya_jax.parallel.mesh import batch_shards
from zaya_jax.train.program import Programs

TARGET = Target("rocm", "gfx942", "gfx942")  # its kernels are traced, but not compiled
REACHED = 0.3  # fraction of the peak; the best published MFU of a mixture of experts in JAX


class PhaseEstimate(NamedTuple):
    """The estimate of a phase.

    Attributes:
      phase: name of the phase.
      axes: number of devices along each mesh axis.
      sequences: sequences of a micro-batch on one device.
      micro_batches: micro-batches of the phase's largest step.
      tokens: tokens of that step.
      steps: number of steps of the phase at that size.
      remat: rematerialization policy.
      reduce: when gradients are reduced over devices.
      memory: bytes of one device.
      flops: FLOPs of a step on all devices, without recomputation: of the head, of attention's scores and values, of
        the rest of the model, and of Newton–Schulz.
      transfers: what a device sends in a step.
      bounds: lower bounds of the step time in seconds, by compute, memory and network; {} without hardware.
      exposed_seconds: time of the collectives that nothing hides; 0 without hardware.
      step_seconds: compute at `REACHED` of the peak or memory, whichever is longer, and the exposed collectives; None
        without hardware.
    """

    phase: str
    axes: dict[str, int]
    sequences: int
    micro_batches: int
    tokens: int
    steps: int
    remat: Remat
    reduce: Reduce
    memory: Memory
    flops: dict[str, float]
    transfers: list[Transfer]
    bounds: dict[str, float]
    exposed_seconds: float
    step_seconds: float | None


def simulated_programs(config: Config, devices: int) -> Programs:
    """Make the programs of a run on `devices` abstract devices.

    Raises:
      InputError: the product of the mesh axes is not `devices`, or a batch does not divide over them.
    """
    programs = Programs(config, select_kernels(TARGET, config.model, config.train.compute_dtype), devices)
    programs.check()
    return programs


def estimate_phase(programs: Programs, phase: int, hardware: Hardware | None) -> PhaseEstimate:
    """Estimate a phase on the devices of `programs`; `hardware` is needed for times."""
    config, program = programs.config, programs[phase]
    phase_config, sizes, devices = config.phases[phase], program.placement.mesh.shape, program.placement.mesh.size
    stage = largest_stage(config, phase)
    micro_batches, sequences, _ = program.batch_shape(stage)
    sequences //= batch_shards(program.placement.mesh)
    memory = estimate_memory(program, sequences, stage.context)
    tokens = stage.sequences * stage.context
    split = config.optimizer.muon.gate_up == "split"
    flops = {
        **{part: tokens * count
           for part, count in model_flops(config.model, stage.context, config.lora is not None).items()},
        "newton_schulz": newton_schulz_flops(config.model, config.optimizer.muon.newton_schulz_steps, split)
        if OPTIMIZERS[config.matrices].newton_schulz else 0.0,
    }  # fmt: skip
    moved = transfers(program, local_shapes(program), sequences, stage.context, micro_batches)
    bounds, exposed, step = {}, 0.0, None
    if hardware is not None:
        bounds = {
            "compute": sum(flops.values()) / devices / hardware.peak,
            "memory": _memory_traffic(memory, micro_batches) / hardware.bandwidth,
            "network": seconds(moved, sizes, hardware),
        }
        exposed = seconds([transfer for transfer in moved if not transfer.hidden], sizes, hardware)
        step = max(bounds["compute"] / REACHED, bounds["memory"]) + exposed
    steps, reduce = math.ceil(phase_config.tokens / tokens), program.placement.config.gradient_reduction
    return PhaseEstimate(phase_config.name, dict(sizes), sequences, micro_batches, tokens, steps, program.remat, reduce,
                         memory, flops, moved, bounds, exposed, step)  # fmt: skip


def model_flops(config: ModelConfig, context: int, frozen_head: bool = False) -> dict[str, float]:
    """Count the training FLOPs per token by part; the sum is `model.arithmetic.training_flops_per_token`."""
    body, attention = prefill_flops_per_token(config, context, head=False), attention_flops_per_token(config, context)
    head = prefill_flops_per_token(config, context) - body
    return {"head": (2 if frozen_head else 3) * head, "attention": 3 * attention, "rest": 3 * (body - attention)}


def largest_stage(config: Config, phase: int) -> BatchStage:
    """Return the stage of a phase with the largest batch."""
    return max((stage for stage in stages(config) if stage.phase == phase), key=lambda stage: stage.sequences)


def _memory_traffic(memory: Memory, micro_batches: int) -> float:
    """Return a lower bound of the bytes that a step reads and writes on a device.

    Master weights and moments are read and written once. For each micro-batch the compute copy (or the stored
    parameters, without a copy) is read in both passes, gradients are accumulated, and activations are written and read.
    """
    computed = max(memory.compute, memory.parameters + memory.frozen)
    per_micro_batch = 2 * (computed + memory.gradients + memory.activations)
    return 2 * (memory.parameters + memory.optimizer) + micro_batches * per_micro_batch


def advice(estimate: PhaseEstimate, hardware: Hardware) -> list[str]:
    """Return changes that reduce the memory of a phase that does not fit, cheapest first."""
    memory, changes = estimate.memory, []
    available = hardware.memory - memory.frozen - memory.parameters - memory.optimizer
    if memory.update <= available:  # otherwise only sharding the state further helps
        if estimate.sequences > 1:
            changes.append(f"batch.micro_batch below {estimate.sequences}")
        if estimate.remat != "full":
            changes.append("remat: full")
        if estimate.reduce == "step" and math.prod(estimate.axes.values()) > 1:
            changes.append("parallel.gradient_reduction: micro_batch")
        if estimate.axes["data"] > 1:
            changes += ["parallel.fsdp instead of parallel.data", "parallel.context instead of parallel.data"]
    return [*changes, "more devices"]
