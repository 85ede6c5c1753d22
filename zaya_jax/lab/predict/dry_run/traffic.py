"""Estimate the bytes that a device sends in a step, from the shardings.

With ring algorithms over n devices, an all-gather sends (n − 1) / n of its output, a reduce-scatter (n − 1) / n of its
input, an all-reduce twice that, and an all-to-all (n − 1) / n of what a device holds.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp

from zaya_jax.hardware.data_sheets import DATA_SHEET, Hardware, LinkAssumptions
from zaya_jax.lab.predict.dry_run.memory import local_copies, sum_bytes
from zaya_jax.lab.predict.step_time import collective_seconds
from zaya_jax.model.arithmetic import cached_values
from zaya_jax.model.experts import rows_per_token
from zaya_jax.model.layers import MATRIX_ROLES
from zaya_jax.optim.build import OPTIMIZERS
from zaya_jax.parallel.gradient import replicated_over
from zaya_jax.parallel.mesh import AXES
from zaya_jax.train.program import PhaseProgram


class Transfer(NamedTuple):
    """The traffic of one kind of collective."""

    what: str  # description of the data
    kind: str  # name of the collective
    axes: tuple[str, ...]  # mesh axes that it runs over
    bytes: float  # bytes that a device sends in a step
    hidden: bool = False  # whether XLA's GPU compiler overlaps it with computation


def transfers(program: PhaseProgram, sequences: int, context: int, micro_batches: int) -> list[Transfer]:
    """Return all transfers of a step of `micro_batches`, with `sequences` of `context` tokens on one device in each."""
    config, parallel, sizes = program.config, program.placement.config, program.placement.mesh.shape
    sent = [*_parameters(program, micro_batches), *_layers(program, micro_batches)]
    if OPTIMIZERS[config.matrices].newton_schulz:
        sent += _muon(program)
    tokens = sequences * context // sizes["context"]  # of a device's micro-batch
    passes = micro_batches * (3 if program.remat != "none" else 2)
    item, exact = jnp.dtype(config.train.compute_dtype).itemsize, sum_bytes(program)
    if (n := sizes["context"]) > 1:
        before = cached_values(config.model, 0)
        kv = (cached_values(config.model, 1) - before) * tokens
        if parallel.context_attention == "ring":  # whose output `dots` keeps
            forward = kv * item * (n - 1) * micro_batches * (3 if program.remat == "full" else 2)
            backward = kv * exact * n * micro_batches
            sent.append(Transfer("keys and values", "collective-permute", ("context",), forward + backward))
        else:
            sent.append(Transfer("keys and values", "all-gather", ("context",), kv * item * (n - 1) * passes))
        halos = before * item * parallel.chunks // n * sequences * passes
        sent.append(Transfer("halos", "collective-permute", ("context",), halos))
    if (n := sizes["expert"]) > 1:
        ragged = parallel.expert_exchange == "ragged"
        share = (n - 1) / n if ragged else n - 1  # evenly routed, or all tokens to all devices
        rows = tokens * rows_per_token(config.model) * config.model.num_layers
        round_trip = 2 * rows * config.model.hidden_size * item * share
        kind = "ragged-all-to-all" if ragged else "all-gather, reduce-scatter"
        sent.append(Transfer("tokens to experts and back", kind, ("expert",), round_trip * passes))
    return [transfer for transfer in sent if transfer.bytes]


def _parameters(program: PhaseProgram, micro_batches: int) -> list[Transfer]:
    placement, sizes, exact = program.placement, program.placement.mesh.shape, sum_bytes(program)
    local = local_copies(program)
    sent = defaultdict[tuple[str, str, tuple[str, ...], bool], float](float)
    times = micro_batches if placement.config.gradient_reduction == "micro_batch" else 1

    def add(what: str, kind: str, axes: tuple[str, ...], held: float, hidden: bool = False) -> None:
        n = math.prod(sizes[axis] for axis in axes)
        sent[what, kind, axes, hidden] += held * (n - 1) / n

    for name, leaf in placement.leaves.items():
        held, trained = local[name].size, name in program.trained
        replicas = replicated_over(leaf, placement.mesh)
        # The layers of a single micro-batch gather their experts, in each pass that computes them.
        in_layers = micro_batches == 1 and leaf.gathered_in_layers and trained
        gathers = 2 if in_layers and program.remat != "none" else 1
        add("parameters", "all-gather", leaf.gathered, gathers * held * placement.dtypes[name].itemsize, in_layers)
        if trained:
            add("gradients", "reduce-scatter", leaf.gathered, held * exact * times, leaf.reduced_in_layers)
            scattered = held / math.prod(sizes[axis] for axis in leaf.gathered)
            add("gradients of replicated parameters", "all-reduce", replicas, 2 * scattered * exact * times)
    return [Transfer(what, kind, axes, count, hidden) for (what, kind, axes, hidden), count in sent.items()]


def _layers(program: PhaseProgram, micro_batches: int) -> list[Transfer]:
    placement, gathered, scattered = program.placement, 0, 0
    for name, x in local_copies(program).items():
        if placement.leaves[name].by_layer:
            held = x.size * (placement.mesh.shape["fsdp"] - 1) * micro_batches
            gathered += held * placement.dtypes[name].itemsize * (1 if program.remat == "none" else 2)
            scattered += held * sum_bytes(program) * (name in program.trained)
    return [
        Transfer("layers", "all-gather", ("fsdp",), gathered, hidden=True),
        Transfer("gradients of layers", "reduce-scatter", ("fsdp",), scattered, hidden=True),
    ]


def _muon(program: PhaseProgram) -> list[Transfer]:
    config, sizes, sent = program.config, program.placement.mesh.shape, defaultdict[tuple[str, ...], float](float)
    exact, local = sum_bytes(program), local_copies(program)
    item = 2 if config.optimizer.muon.newton_schulz_dtype == "bfloat16" and exact == 4 else exact
    for name in program.trained:
        leaf = program.placement.leaves[name]
        n, gather_size = (math.prod(sizes[axis] for axis in axes) for axes in (leaf.over, leaf.gathered))
        if program.roles[name] in MATRIX_ROLES and n > 1:  # else devices hold whole matrices, such as some experts each
            stack = math.prod(local[name].shape[:-2])
            padded = -(-stack // n) * n / stack  # the stack is padded to a multiple of the devices
            sent[leaf.over] += 2 * local[name].size / gather_size * item * padded * (n - 1) / n
    return [Transfer("matrices for Newton–Schulz", "all-to-all", axes, count) for axes, count in sent.items()]


def seconds(
    sent: Sequence[Transfer], sizes: Mapping[str, int], hardware: Hardware, achieved: LinkAssumptions = DATA_SHEET
) -> float:
    """Return the communication time without overlap and latency; at data-sheet speed, a lower bound."""
    return sum(collective_seconds(x.kind, x.bytes, group_devices(x.axes, sizes), hardware, achieved) for x in sent)


def group_devices(axes: Sequence[str], sizes: Mapping[str, int]) -> list[int]:
    """Return the numbers of the devices that device 0 communicates with over `axes` of a mesh, itself included."""
    strides = {axis: math.prod(sizes[inner] for inner in AXES[AXES.index(axis) + 1 :]) for axis in axes}
    ranges = (range(0, sizes[axis] * strides[axis], strides[axis]) for axis in axes)
    return sorted(map(sum, itertools.product(*ranges)))
