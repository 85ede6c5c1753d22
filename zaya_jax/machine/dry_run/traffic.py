"""Bytes that a device sends in a step, from the sharding table.

A ring sends (n − 1) / n of what an all-gather gives or a reduce-scatter takes, an all-reduce twice that, and an
all-to-all as much of what a device holds.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from zaya_jax.config import Config
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.model.layers import MATRIX_ROLES, Role
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.parallel.layout import Layout
from zaya_jax.parallel.mesh import AXES, nontrivial_axes


class Transfer(NamedTuple):
    """What one kind of collective sends.

    Attributes:
      what: for a person.
      kind: of collective.
      axes: of the mesh it runs over.
      bytes: that a device sends in a step.
    """

    what: str
    kind: str
    axes: tuple[str, ...]
    bytes: float


def transfers(
    config: Config, phase: int, layout: Layout, roles: Mapping[str, Role], trained: Collection[str],
    local: Mapping[str, tuple[int, ...]], sequences: int, micro_batches: int,
) -> list[Transfer]:  # fmt: skip
    """All transfers of a step of a phase.

    Args:
      config: of the run.
      phase: which of its phases.
      layout: of that phase.
      roles: of all parameters.
      trained: those of them that have a gradient.
      local: shape of each parameter's compute copy on one device.
      sequences: of a micro-batch, on one device.
      micro_batches: of a step.
    """
    sizes = layout.mesh.shape
    found = [*_parameters(config, layout, trained, local, micro_batches),
             *_layers(config, phase, layout, trained, local, micro_batches)]  # fmt: skip
    if config.matrices == "muon":
        found += _muon(config, layout, roles, local)
    tokens = sequences * config.context_of(config.phases[phase]) // sizes["context"]  # of a device's micro-batch
    passes = micro_batches * (3 if config.remat_of(config.phases[phase]) != "none" else 2)
    item = _compute_bytes(config)
    if sizes["context"] > 1:
        n, kv = sizes["context"], 2 * config.model.kv_size * tokens * config.model.num_layers
        if layout.config.context_attention == "ring":
            there = kv * item * (n - 1) * passes
            back = kv * accumulation_dtype(config.train.compute_dtype).itemsize * n * micro_batches
            found.append(Transfer("keys and values", "collective-permute", ("context",), there + back))
        else:
            found.append(Transfer("keys and values", "all-gather", ("context",), kv * item * (n - 1) * passes))
        if config.model.attention == "cca":  # whose convolutions and value shift read the tokens before a piece
            rows = config.model.depthwise_kernel + config.model.grouped_kernel - 2
            width = rows * (config.model.query_size + config.model.kv_size) + config.model.kv_size // 2
            pieces = layout.config.chunks // n
            halo = width * item * pieces * sequences * config.model.num_layers * passes
            found.append(Transfer("halos", "collective-permute", ("context",), halo))
    if (n := sizes["expert"]) > 1:
        ragged = layout.config.expert_exchange == "ragged"
        share = (n - 1) / n if ragged else n - 1  # evenly routed, or all tokens to all devices
        there_and_back = 2 * tokens * config.model.hidden_size * item * config.model.num_layers * share
        kind = "ragged-all-to-all" if ragged else "all-gather, reduce-scatter"
        found.append(Transfer("tokens to experts and back", kind, ("expert",), there_and_back * passes))
    return [one for one in found if one.bytes]


def _compute_bytes(config: Config) -> int:
    return {"bfloat16": 2, "float32": 4, "float64": 8}[config.train.compute_dtype]


def _parameters(
    config: Config, layout: Layout, trained: Collection[str], local: Mapping[str, tuple[int, ...]], micro_batches: int
) -> list[Transfer]:
    gathered: dict[tuple[str, ...], float] = {}
    scattered: dict[tuple[str, ...], float] = {}
    summed: dict[tuple[str, ...], float] = {}
    times = micro_batches if layout.config.reduce == "micro_batch" else 1
    exact = accumulation_dtype(config.train.compute_dtype).itemsize
    for name, place in layout.placed.items():
        held, axes = math.prod(local[name]), place.gathered
        if place.axis is not None and axes:
            n = math.prod(layout.mesh.shape[axis] for axis in axes)
            sent, held = held * (n - 1) / n, held // n
            gathered[axes] = gathered.get(axes, 0.0) + sent * layout.dtypes[name].itemsize
            if name in trained:
                scattered[axes] = scattered.get(axes, 0.0) + sent * exact * times
        own = {*place.over, *(["expert"] if place.by_expert else [])}
        others = tuple(axis for axis in nontrivial_axes(layout.mesh, AXES) if axis not in own)
        if others and name in trained:
            n = math.prod(layout.mesh.shape[axis] for axis in others)
            summed[others] = summed.get(others, 0.0) + 2 * held * exact * times * (n - 1) / n
    return [
        *(Transfer("parameters", "all-gather", axes, sent) for axes, sent in gathered.items()),
        *(Transfer("gradients", "reduce-scatter", axes, sent) for axes, sent in scattered.items()),
        *(Transfer("gradients of what is not split", "all-reduce", axes, sent) for axes, sent in summed.items()),
    ]


def _layers(
    config: Config,
    phase: int,
    layout: Layout,
    trained: Collection[str],
    local: Mapping[str, tuple[int, ...]],
    micro_batches: int,
) -> list[Transfer]:
    n = layout.mesh.shape["fsdp"]
    held = {name: math.prod(local[name]) for name, place in layout.placed.items() if place.by_layer}
    again = 1 if config.remat_of(config.phases[phase]) == "none" else 2
    gathered = sum(count * layout.dtypes[name].itemsize for name, count in held.items()) * (n - 1)
    scattered = (
        sum(count for name, count in held.items() if name in trained)
        * accumulation_dtype(config.train.compute_dtype).itemsize
        * (n - 1)
    )
    return [Transfer("layers", "all-gather", ("fsdp",), gathered * micro_batches * again),
            Transfer("gradients of layers", "reduce-scatter", ("fsdp",), scattered * micro_batches)]  # fmt: skip


def _muon(
    config: Config, layout: Layout, roles: Mapping[str, Role], local: Mapping[str, tuple[int, ...]]
) -> list[Transfer]:
    sent: dict[tuple[str, ...], float] = {}
    exact = accumulation_dtype(config.train.compute_dtype).itemsize
    item = 2 if config.optimizer.muon.iterates == "bfloat16" and exact == 4 else exact
    for name, place in layout.placed.items():
        if roles[name] not in MATRIX_ROLES or place.axis is None:
            continue
        n = math.prod(layout.mesh.shape[axis] for axis in place.over)
        rest = math.prod(layout.mesh.shape[axis] for axis in place.gathered)
        stack = math.prod(local[name][:-2])
        padded = -(-stack // n) * n / stack  # the stack travels with zeros, so that each device has as many of it
        held = math.prod(local[name]) / rest * item * padded
        sent[place.over] = sent.get(place.over, 0.0) + 2 * held * (n - 1) / n
    return [Transfer("matrices for Newton–Schulz", "all-to-all", axes, count) for axes, count in sent.items()]


def seconds(found: Sequence[Transfer], sizes: Mapping[str, int], hardware: Hardware) -> float:
    """The least time on the wire: each collective at the speed of the slowest link it crosses."""
    return sum(one.bytes / _speed(one.axes, sizes, hardware) for one in found)


def _speed(axes: tuple[str, ...], sizes: Mapping[str, int], hardware: Hardware) -> float:
    outermost = min(AXES.index(axis) for axis in axes)
    span = math.prod(sizes[axis] for axis in AXES[outermost:])  # devices lie innermost axis first
    return hardware.intra_node if span <= hardware.node_size else hardware.inter_node
