"""Estimate a phase, and a decode step, from shapes: memory, FLOPs, communication and time."""

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from zaya_jax.config import Config, ModelConfig
from zaya_jax.config.parallel import Reduce
from zaya_jax.config.phases import Remat
from zaya_jax.config.stages import largest_stage
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.lab.predict.dry_run.memory import CountActivations, Memory, count_activations, estimate_memory
from zaya_jax.lab.predict.dry_run.traffic import Transfer, seconds, transfers
from zaya_jax.lab.predict.step_time import Timeline, Work
from zaya_jax.model import arithmetic
from zaya_jax.ops.registry import KernelSelection, pins_on, select_kernels
from zaya_jax.ops.target import Target
from zaya_jax.optim.build import OPTIMIZERS
from zaya_jax.parallel.mesh import batch_shards
from zaya_jax.train.program import PhaseProgram, Programs

TARGET = Target("rocm", "gfx942", "gfx942")  # its kernels are traced, but not compiled

# Of a layer's kernels (`Assumptions.layer_launches`), those in a decode step: 41 of 117 or 42 of 120.
FORWARD_LAUNCHES = 1 / 3


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
    flops: dict[str, float]  # of a step on all devices, by part, without recomputation
    transfers: list[Transfer]  # what a device sends in a step
    bounds: dict[str, float]  # least seconds of a step, by compute, memory and network; {} without hardware
    keys: dict[str, str]  # keys of the configuration that set the phase's `batch`, `remat` and `parallel` layout
    seconds: dict[str, float]  # estimated time of a step by component; {} without hardware
    most_seconds: float = 0.0  # time of a step at the slow end of what is not known of the hardware
    work: tuple[Work, ...] = ()  # of a device in a step; () without hardware

    @property
    def step_seconds(self) -> float | None:
        """Estimated time of a step; None without hardware."""
        return sum(self.seconds.values()) if self.seconds else None


class DecodeEstimate(NamedTuple):
    """The estimate of a step that decodes one token of one sequence."""

    parameters: int  # bytes of parameters that the step reads
    cache: int  # bytes of keys, values and convolution states that it reads
    memory: int  # bytes of all parameters and the cache
    seconds: dict[str, float]  # predicted time by component

    @property
    def step_seconds(self) -> float:
        """Predicted time of the step: the latency of a token."""
        return sum(self.seconds.values())


def simulated_programs(config: Config, devices: int, kernels: KernelSelection | None = None) -> Programs:
    """Make a run's programs on abstract devices; InputError if mesh axes or a batch do not divide over them."""
    pinned = pins_on(TARGET.platform, config.ops)
    kernels = kernels or select_kernels(TARGET, config.model, config.train.compute_dtype, None, pinned)
    programs = Programs(config, kernels, devices)
    programs.check()
    return programs


def estimate_phase(
    programs: Programs, phase: int, hardware: Hardware | None, count: CountActivations = count_activations
) -> PhaseEstimate:
    """Estimate a phase of a run, by its index, on its programs' devices; times need `hardware`."""
    config, program, stage = programs.config, programs[phase], largest_stage(programs.config, phase)
    phase_config, mesh, parallel = config.phases[phase], program.placement.mesh, program.placement.config
    micro_batches, sequences, _ = program.batch_shape(stage)
    sequences, tokens = sequences // batch_shards(mesh), stage.sequences * stage.context
    memory = estimate_memory(program, sequences, stage.context, micro_batches, count)
    moved = transfers(program, sequences, stage.context, micro_batches)
    model = model_flops(config.model, stage.context, config.lora is not None)
    flops = {**{part: tokens * each for part, each in model.items()}, "newton_schulz": _newton_schulz(config, {})}
    remat_key = "train" if phase_config.remat is None else config.phase_key(phase)
    estimate = PhaseEstimate(
        phase=phase_config.name,
        axes=dict(mesh.shape),
        sequences=sequences,
        micro_batches=micro_batches,
        tokens=tokens,
        steps=math.ceil(phase_config.tokens / tokens),
        remat=program.remat,
        reduce=parallel.gradient_reduction,
        memory=memory,
        flops=flops,
        transfers=moved,
        bounds={},
        keys={
            "batch": config.batch_key(phase_config),
            "remat": f"{remat_key}.remat",
            "parallel": config.parallel_key(phase_config),
        },
        seconds={},
    )
    return estimate if hardware is None else _with_times(estimate, program, hardware)


def _with_times(estimate: PhaseEstimate, program: PhaseProgram, hardware: Hardware) -> PhaseEstimate:
    """Add `bounds` and `seconds` to an estimate."""
    config, mesh, reached = program.config, program.placement.mesh, hardware.reached
    leaves = program.placement.leaves.items()
    repeats = {name: mesh.size // math.prod(mesh.shape[axis] for axis in leaf.split) for name, leaf in leaves}
    executed = {**estimate.flops, "newton_schulz": _newton_schulz(config, repeats)}
    least = _least_traffic(estimate.memory, estimate.micro_batches)
    bounds = {
        "compute": sum(work.roofline(hardware) for work in _matmuls(executed, "none", program)),
        "memory": least / hardware.bandwidth,
        "network": seconds(estimate.transfers, mesh.shape, hardware),
    }
    hidden, exposed = (
        seconds([sent for sent in estimate.transfers if sent.hidden == behind], mesh.shape, hardware, hardware.links)
        for behind in (True, False)
    )
    launches = estimate.micro_batches * config.model.num_layers * reached.layer_launches
    traffic = Work("other memory traffic", bytes=reached.traffic * least, launches=0)
    work = (*_matmuls(executed, program.remat, program), traffic)

    def times(device: Hardware) -> dict[str, float]:
        timeline = Timeline()
        end = timeline.start(hidden)
        components = timeline.run(work, device)
        waits = launches * device.reached.launch  # of which measured times have as much as they can
        components["kernel launches"] = max(waits - timeline.now, 0.0) if device.rated else waits
        timeline.now += components["kernel launches"]
        return components | {"exposed network": timeline.wait(end) + timeline.wait(timeline.start(exposed))}

    most = sum(times(hardware.slowest).values())
    return estimate._replace(bounds=bounds, seconds=times(hardware), most_seconds=most, work=work)


def _newton_schulz(config: Config, repeats: Mapping[str, int]) -> float:
    rounds = config.optimizer.muon.newton_schulz_steps * OPTIMIZERS[config.matrices].newton_schulz
    return arithmetic.newton_schulz_flops(config.model, rounds, config.optimizer.muon.gate_up == "split", repeats)


def _matmuls(flops: Mapping[str, float], remat: Remat, program: PhaseProgram) -> list[Work]:
    """Return a device's part of the matmuls and kernels of a step, of which `flops` are those of all devices."""
    name, devices, config = "matmuls and kernels", program.placement.mesh.size, program.config
    fp32 = config.train.compute_dtype != "bfloat16"
    fp32_iterates = fp32 or config.optimizer.muon.newton_schulz_dtype != "bfloat16"
    layers = (flops["attention"] + flops["rest"]) * (4 / 3 if remat == "full" else 1)
    return [
        Work(name, flops=layers / devices, rate="layers", fp32=fp32, launches=0, kernel="layers"),
        Work(name, flops=flops["head"] / devices, fp32=fp32, launches=0, kernel="head"),
        Work(name, flops=flops["newton_schulz"] / devices, fp32=fp32_iterates, launches=0, kernel="newton_schulz"),
    ]


def model_flops(config: ModelConfig, context: int, frozen_head: bool = False) -> dict[str, float]:
    """Count the training FLOPs per token by part; the sum is `model.arithmetic.training_flops_per_token`."""
    body = arithmetic.prefill_flops_per_token(config, context, head=False)
    attention = arithmetic.attention_flops_per_token(config, context)
    head = arithmetic.prefill_flops_per_token(config, context) - body
    return {"head": (2 if frozen_head else 3) * head, "attention": 3 * attention, "rest": 3 * (body - attention)}


def _least_traffic(memory: Memory, micro_batches: int) -> float:
    """Return a lower bound of the bytes that a step reads and writes on a device.

    Master weights and moments are read and written once. For each micro-batch the compute copy (or the stored
    parameters, without a copy) is read in both passes, gradients are accumulated, and activations are written and read.
    """
    computed = max(memory.compute, memory.parameters + memory.frozen)
    per_micro_batch = 2 * (computed + memory.gradients + memory.activations)
    return 2 * (memory.parameters + memory.optimizer) + micro_batches * per_micro_batch


def estimate_decode(model: ModelConfig, context: int, dtype: str, hardware: Hardware) -> DecodeEstimate:
    """Estimate a decode step on one device, with `context` tokens in the cache.

    It reads the parameters that its token uses, and the cache, both of `dtype`, and each layer launches kernels.
    Arithmetic hides behind the reads, since a decode step has about one multiply-add for each parameter that it reads
    (docs/reference.md §1.3).
    """
    item = jnp.dtype(dtype).itemsize
    head = model.vocab_size * model.hidden_size  # whose parameters are read
    parameters = item * (arithmetic.active_parameters(model) + head)
    cache = item * arithmetic.cached_values(model, context)
    launches = model.num_layers * hardware.reached.layer_launches * FORWARD_LAUNCHES
    work = [Work("memory traffic", bytes=parameters + cache, launches=0), Work("kernel launches", launches=launches)]
    memory = item * arithmetic.total_parameters(model) + cache
    return DecodeEstimate(parameters, cache, memory, Timeline().run(work, hardware))


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
