"""Search widths, layouts, rematerialization policies and micro-batches for fast training and fast decoding.

The estimates are those of the dry run. To count activations, it traces a step, which takes seconds for each shape. The
search leaves out only what a lower bound of the step's time proves to be dominated:

1. The time and the memory of a step grow with its activations. With `least_activations` in place of those counted, the
   estimates are lower bounds.
2. A layout and policy with several micro-batches is no slower with larger ones: a step then launches fewer kernels, and
   reads its parameters and updates its gradients less often. The same holds for its lower bound.
3. The time of the matrix products is the same for all layouts and micro-batches.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple, get_args

import jax.numpy as jnp

from zaya_jax.config import Config, ModelConfig, ParallelConfig
from zaya_jax.config.parallel import AXES
from zaya_jax.config.phases import Remat
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.lab.predict.dry_run import suggest as phase_settings
from zaya_jax.lab.predict.dry_run.estimate import TARGET, PhaseEstimate, estimate_phase, simulated_programs
from zaya_jax.lab.predict.dry_run.memory import Activations
from zaya_jax.model.arithmetic import active_parameters, cached_values, total_parameters
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.ops.registry import select_kernels
from zaya_jax.run.progress import track
from zaya_jax.train.program import PhaseProgram

# A decode step runs the forward pass, which launches 41 of a layer's 117 kernels in XLA's program of the 8B for an
# H200, and 42 of 120 for an MI300X (`hardware.assumptions.layer_launches`).
FORWARD_LAUNCHES = 1 / 3


class DecodeEstimate(NamedTuple):
    """The prediction for a step that decodes one token of one sequence."""

    parameters: int  # bytes of parameters that the step reads
    cache: int  # bytes of keys, values and convolution states that it reads
    memory: int  # bytes of all parameters and the cache
    seconds: dict[str, float]  # predicted time by component

    @property
    def step_seconds(self) -> float:
        """Predicted time of the step: the latency of a token."""
        return sum(self.seconds.values())


class Point(NamedTuple):
    """A shape with the settings of a phase."""

    config: Config  # the configuration with both
    overrides: tuple[str, ...]  # the change, as arguments of the command; () for none
    training: PhaseEstimate  # estimate of the phase
    decode: DecodeEstimate  # prediction of a decode step with one sequence, as long as the phase's

    @property
    def values(self) -> tuple[float, float]:
        """Predicted seconds of a training step and of a decode step: less is better."""
        return sum(self.training.seconds.values()), self.decode.step_seconds

    @property
    def tokens_per_second(self) -> float:
        """Predicted training throughput of all devices."""
        return self.training.tokens / self.values[0]


def search(
    config: Config, phase: int, devices: int, hardware: Hardware, shapes: Sequence[ModelConfig]
) -> tuple[list[Point], Point | None]:
    """Return the Pareto front of training throughput and decode latency.

    The candidates are the `shapes` with the layouts of `whole_node_layouts`, every policy, and micro-batches in powers
    of two, if training and decoding are estimated to fit.

    Args:
      config: configuration of the run.
      phase: index of the phase to train.
      devices: number of devices.
      hardware: data sheet or measurements.
      shapes: the shapes to compare.

    Returns:
      The front, from the highest throughput; and the fastest point of the configuration's own shape, which need not be
      on the front, or None if it does not fit or is not among `shapes`.
    """
    context, dtype = config.context_for(config.phases[phase]), config.train.compute_dtype
    decodes = {shape: estimate_decode(shape, context, dtype, hardware) for shape in shapes}
    fitting = [shape for shape in shapes if decodes[shape].memory <= hardware.allocatable]
    points, own, fastest = list[Point](), None, math.inf
    # In this order, only a shape that trains at least as fast as all before it can be on the front.
    fastest_first = sorted(fitting, key=lambda shape: decodes[shape].step_seconds)
    for shape in track("trying", fastest_first, lambda x: f"hidden_size {x.hidden_size}, {x.num_layers} layers"):
        changed, is_own = dataclasses.replace(config, model=shape), shape == config.model
        for settings, estimate in _fastest(changed, phase, devices, hardware, math.inf if is_own else fastest):
            widths = phase_settings.differences(config.model, shape)
            change = (*(f"model.{name}={value}" for name, value in widths.items()),
                      *phase_settings.overrides(config, config.phases[phase], settings.phases[phase]))  # fmt: skip
            points.append(Point(settings, change, estimate, decodes[shape]))
            own = points[-1] if is_own else own  # the last one is the fastest
            fastest = min(fastest, points[-1].values[0])
    return [points[index] for index in pareto_front([point.values for point in points])], own


def _fastest(
    config: Config, phase: int, devices: int, hardware: Hardware, limit: float
) -> list[tuple[Config, PhaseEstimate]]:
    """Return settings that fit, each at least as fast as those before it; the fastest of all if within the limit.

    Args:
      config: configuration of the run, with the shape.
      phase: index of the phase.
      devices: number of devices.
      hardware: data sheet or measurements.
      limit: seconds; slower steps need not be returned.
    """
    kernels = select_kernels(TARGET, config.model, config.train.compute_dtype, None, config.ops)
    context, bounded, products = config.context_for(config.phases[phase]), [], dict[Remat, float]()
    for parallel in whole_node_layouts(config, phase, devices, hardware.node_size):
        for remat in get_args(Remat):
            if products.get(remat, 0.0) > limit:
                continue
            for micro_batch in reversed(phase_settings.micro_batch_sizes(config, phase, devices // parallel.context)):
                tokens = micro_batch * context // parallel.context
                if _least_bytes(config.model, remat, tokens, config.train.compute_dtype) > hardware.allocatable:
                    continue
                changed = phase_settings.with_settings(config, phase, parallel, remat, micro_batch)
                try:
                    changed.check()
                    programs = simulated_programs(phase_settings.single_phase(changed, phase), devices, kernels)
                except InputError:
                    continue
                bound = estimate_phase(programs, 0, hardware, least_activations)
                seconds, products[remat] = sum(bound.seconds.values()), bound.seconds["matmuls and kernels"]
                if seconds <= limit and bound.memory.total <= hardware.allocatable:
                    bounded.append((seconds, changed, programs))
                elif seconds > limit and bound.micro_batches > 1:
                    break
    fitting, table = [], phase_settings.ActivationTable()
    for least, changed, programs in sorted(bounded, key=lambda candidate: candidate[0]):
        if least > limit:
            break
        estimate = estimate_phase(programs, 0, hardware, table)
        seconds = sum(estimate.seconds.values())
        if seconds <= limit and estimate.memory.total <= hardware.allocatable:
            fitting.append((changed, estimate))
            limit = seconds
    return fitting


def estimate_decode(model: ModelConfig, context: int, dtype: str, hardware: Hardware) -> DecodeEstimate:
    """Predict a decode step on one device.

    It reads the parameters that its token uses, and the cache, at the bandwidth that `Hardware.reached` assumes; and
    each layer launches kernels, of which each takes a fixed time. Arithmetic hides behind the reads, since a decode
    step has about one multiply-add for each parameter that it reads (docs/reference.md §1.3).

    Args:
      model: the architecture.
      context: tokens in the cache.
      dtype: name of the dtype of parameters and cache.
      hardware: data sheet or measurements.
    """
    item, reached = jnp.dtype(dtype).itemsize, hardware.reached
    parameters = item * (active_parameters(model) + model.vocab_size * model.hidden_size)  # those of the head are read
    cache = item * cached_values(model, context)
    seconds = {
        "memory traffic": (parameters + cache) / (hardware.bandwidth * reached.memory),
        "kernel launches": model.num_layers * reached.layer_launches * FORWARD_LAUNCHES * reached.launch,
    }
    return DecodeEstimate(parameters, cache, item * total_parameters(model) + cache, seconds)


def whole_node_layouts(config: Config, phase: int, devices: int, node: int) -> list[ParallelConfig]:
    """Return the layouts of `find_layouts` whose axes have one device each, or as many of a node as they can.

    Part of a node uses part of its links (`rules.whole_nodes`).
    """
    layouts = list(phase_settings.find_layouts(config, phase, devices, node, across_nodes=False))
    most = {axis: max(getattr(layout, axis) for layout in layouts) for axis in AXES if axis != "data"}
    return [layout for layout in layouts if all(getattr(layout, axis) in (1, size) for axis, size in most.items())]


def least_activations(program: PhaseProgram, sequences: int, context: int) -> Activations:
    """Return a lower bound of `memory.count_activations`."""
    tokens = sequences * context // program.placement.mesh.shape["context"]
    dtype = program.config.train.compute_dtype
    return Activations(_least_bytes(program.model.config, program.remat, tokens, dtype), 0)


def _least_bytes(model: ModelConfig, remat: Remat, tokens: int, dtype: str) -> int:
    """Return a lower bound of the bytes that the layers keep of `tokens` tokens for the backward pass.

    Each keeps its input from the residual stream. All policies but `full` also keep the outputs of the matrix products:
    of both projections of attention, of attention itself, and of the two products of an expert.
    """
    kept = model.hidden_size * accumulation_dtype(dtype).itemsize
    if remat != "full":
        products = 2 * (model.query_size + model.kv_size + model.hidden_size + model.expert_size)
        kept += products * jnp.dtype(dtype).itemsize
    return model.num_layers * tokens * kept


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of the points that no other point dominates, in ascending order of the first value.

    A point dominates another if it is no worse in both values and better in one. Equal points do not dominate each
    other: the front has all of them or none.
    """
    front, least = list[int](), float("inf")
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        second = points[index][1]
        if second < least or (front and points[index] == points[front[-1]]):
            front.append(index)
            least = second
    return front


def dominates(point: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether `point` is no worse than `other` in both values, and better in one."""
    return point != other and point[0] <= other[0] and point[1] <= other[1]
