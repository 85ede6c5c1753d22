"""Estimate the memory of one device from shardings and rematerialization policy, without allocating anything.

Parameters and optimizer state are exact. Activations are the residuals of the traced program's `vjp`, at the shapes of
one device; a compiler may need a little more or less. Memory peaks either in the backward pass, or afterwards, where
Muon orthogonalizes the largest stack of matrices.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from zaya_jax.config.phases import Remat
from zaya_jax.model.layers import MATRIX_ROLES
from zaya_jax.model.lora import ADAPTED
from zaya_jax.model.loss import chunk_tokens
from zaya_jax.model.tree import shapes
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.optim.build import OPTIMIZERS
from zaya_jax.optim.muon import chunk_size
from zaya_jax.parallel.gradient import compute_copy, differentiated, frozen_copy, reduce_rest, scatter_in_layers
from zaya_jax.parallel.mesh import batch_shards, batch_spec
from zaya_jax.parallel.placement import device_bytes
from zaya_jax.train.program import PhaseProgram, Programs
from zaya_jax.train.step import make_local_loss


class Activations(NamedTuple):
    """Bytes that one device keeps of a micro-batch's forward pass, and that it recomputes at once in the backward."""

    kept: int
    recomputed: int


Residuals = Callable[[PhaseProgram, int, int], int]  # as `residual_bytes`
CountActivations = Callable[[PhaseProgram, int, int], Activations]  # as `count_activations`


class Memory(NamedTuple):
    """Peak memory of one device, in bytes."""

    parameters: int  # master weights
    optimizer: int  # moments, balancing state, counters
    compute: int  # copy of the parameters in the compute dtype
    # accumulated gradients, to which layers add theirs in place. If they are reduced after each micro-batch, also those
    # of one micro-batch.
    gradients: int
    # what is saved for the backward pass of a micro-batch; twice, if the layers of the last one reduce their gradients
    activations: int
    temporaries: int  # recomputed activations and gathered parameters of a layer, or a chunk of logits
    update: int  # gradients and Newton–Schulz iterates at the peak of the optimizer's step
    frozen: int = 0  # frozen parameters under adapters

    @property
    def total(self) -> int:
        """The larger of the two peaks."""
        passes = self.compute + self.gradients + self.activations + self.temporaries
        return self.frozen + self.parameters + self.optimizer + max(passes, self.update)


def estimate_memory(
    program: PhaseProgram, sequences: int, context: int, micro_batches: int, count: CountActivations
) -> Memory:
    """Estimate a device's memory in a phase, with `sequences` of `context` tokens in each of its `micro_batches`."""
    activations = count(program, sequences, context)
    placement, state = program.placement, program.abstract_state
    master_weights, devices = device_bytes(state.params), placement.mesh.size
    single = micro_batches == 1 and devices > 1
    reduces = single or (placement.config.gradient_reduction == "micro_batch" and devices > 1)
    scatters = any(leaf.reduced_in_layers for leaf in placement.leaves.values())
    return Memory(
        parameters=master_weights,
        optimizer=device_bytes(state) - master_weights,
        compute=_copy_bytes(program, single),
        gradients=_gradient_bytes(program, single, reduces),
        # XLA clears the memory for those of the last micro-batch ahead of the loop over the others.
        activations=activations.kept * (2 if scatters and not reduces else 1),
        temporaries=_temporaries(program, sequences * context, activations.recomputed, single),
        update=_update(program, master_weights),
        frozen=device_bytes(program.abstract_base),
    )


def sum_bytes(program: PhaseProgram) -> int:
    """Return the bytes of a number of a gradient's sum."""
    return accumulation_dtype(program.config.train.compute_dtype).itemsize


@functools.lru_cache(maxsize=16)  # estimates of the same program with other micro-batches share it
def _gradient_bytes(program: PhaseProgram, single: bool, reduces: bool) -> int:
    """Return bytes of the gradients of a micro-batch, and of those that are accumulated."""
    placement, devices = program.placement, program.placement.mesh.size

    def gradients_of(copy: Any, _: Any) -> Any:
        if not reduces:
            # Layers add theirs in place. Gathered one at a time, XLA has also a micro-batch's own, and a third if the
            # copy is gathered over other axes first. The embedding's is there once more before its reduction.
            layers = {name: x for name, x in copy.items() if placement.leaves[name].by_layer}
            gathered = {name: x for name, x in layers.items() if placement.leaves[name].gathered}
            embedding = {name: x for name, x in copy.items() if program.roles[name] == "embedding" and devices > 1}
            return (layers, gathered, embedding), jax.tree.map(lambda x: x.astype(accumulation_dtype(x.dtype)), copy)
        parts = scatter_in_layers(copy, None, placement.leaves, placement.mesh)
        micro = differentiated(parts)
        return micro, {} if single else reduce_rest(micro, parts, None, placement.leaves, placement.mesh)

    return _bytes(_on_one_device(program, gradients_of))


def _update(program: PhaseProgram, master_weights: int) -> int:
    """Return bytes of sharded gradients, the largest stack, and iterates, Gram matrix and polynomial of a chunk."""
    config, mesh = program.config, program.placement.mesh
    if not OPTIMIZERS[config.matrices].newton_schulz:
        return master_weights
    sums, highest = sum_bytes(program), 0.0
    item = 2 if config.optimizer.muon.newton_schulz_dtype == "bfloat16" else sums
    for name, shape in shapes(program.model).items():
        if program.roles[name] in MATRIX_ROLES:
            leaf, (p, q) = program.placement.leaves[name], sorted(shape[-2:])
            parts = math.prod(mesh.shape[axis] for axis in leaf.split)
            stack = -(-math.prod(shape[:-2]) // parts)  # whole matrices on a device, padding included
            chunk = chunk_size(max(stack, 1), p * q * item)
            highest = max(highest, stack * p * q * item + chunk * (3 * p * q * item + p * p * (2 * item + sums // 2)))
    return master_weights + int(highest)


def _copy_bytes(program: PhaseProgram, single: bool) -> int:
    """Return bytes of the compute copy, without parameters that are used as stored.

    XLA keeps a gathered embedding in the compute dtype, and a copy of FSDP layers that are sharded along an axis of
    their matrices. Experts that layers of a single micro-batch gather are whole only without rematerialization.
    """
    stored, placement, total = {**program.abstract_base, **program.abstract_state.params}, program.placement, 0
    for name, x in local_copies(program).items():
        leaf = placement.leaves[name]
        reordered = leaf.by_layer and "fsdp" not in leaf.experts_over
        if leaf.gathered:
            count = x.size
            if single and leaf.gathered_in_layers and name in program.trained:
                shards = math.prod(placement.mesh.shape[axis] for axis in leaf.gathered)
                count = count // shards + (count if program.remat == "none" else 0)
            total += (2 if reordered else 1) * count * placement.dtypes[name].itemsize
        elif reordered or x.dtype != stored[name].dtype:
            total += _bytes(x)
    return total


@functools.lru_cache(maxsize=16)  # an estimate reads them several times
def local_copies(program: PhaseProgram) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shape and dtype of each parameter's compute copy on one device."""
    copies = _on_one_device(program, lambda copy, frozen_copies: {**frozen_copies, **copy})
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in copies.items()}


def _bytes(tree: Any) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _on_one_device(program: PhaseProgram, function: Callable[..., Any], *more: Any, specs: tuple[Any, ...] = ()) -> Any:
    """Call `function` with the compute copies, trained and frozen, and `more`, all at the shapes of one device."""
    placement, results = program.placement, []

    def region(params: Any, frozen: Any, *more: Any) -> None:
        copy = compute_copy(params, placement.leaves, placement.dtypes)
        results.append(function(copy, frozen_copy(frozen, placement.leaves), *more))

    arguments = program.abstract_state.params, program.abstract_base
    stored = ({name: placement.leaves[name].stored for name in tree} for tree in arguments)
    mapped = jax.shard_map(
        region, mesh=placement.mesh, in_specs=(*stored, *specs), out_specs=PartitionSpec(), check_vma=False
    )
    jax.eval_shape(mapped, *arguments, *more)
    return results[0]


def residual_bytes(program: PhaseProgram, sequences: int, context: int) -> int:
    """Return the bytes that one device saves for the backward pass of `sequences` of `context` tokens."""
    loss, global_shape = make_local_loss(program), (sequences * batch_shards(program.placement.mesh), context)
    kinds = {"tokens": "int32", "targets": "int32", "segment_ids": "int32", "positions": "int32", "loss_mask": "bool"}
    batch = {name: jax.ShapeDtypeStruct(global_shape, dtype) for name, dtype in kinds.items()}

    def residuals(copy: Any, frozen_copies: Any, balance: Any, batch: Any) -> int:
        _, pull, _ = jax.vjp(lambda copy: loss({**frozen_copies, **copy}, balance, batch), copy, has_aux=True)
        arguments = {id(x) for x in jax.tree.leaves((copy, frozen_copies, balance, batch))}
        return _bytes([x for x in jax.tree.leaves(pull) if hasattr(x, "dtype") and id(x) not in arguments])

    specs = (PartitionSpec(), batch_spec())
    return _on_one_device(program, residuals, program.abstract_state.balance, batch, specs=specs)


def count_activations(
    program: PhaseProgram, sequences: int, context: int, residuals: Residuals | None = None
) -> Activations:
    """Count the activations of `sequences` of `context` tokens; those recomputed are of one group of layers."""
    residuals = residuals or residual_bytes
    config, model, placement = program.config, program.model.config, program.placement
    small = dataclasses.replace(model, num_layers=len(model.period), layer_pattern=model.period)

    def group(remat: Remat) -> int:
        phase = dataclasses.replace(config.phases[0], parallel=placement.config, remat=remat)
        changed = dataclasses.replace(config, model=small, phases=(phase,))
        return residuals(Programs(changed, placement.kernels, placement.mesh.size)[0], sequences, context)

    return Activations(residuals(program, sequences, context), max(0, group("none") - group("full")))


def _temporaries(program: PhaseProgram, tokens: int, recomputed: int, single: bool) -> int:
    """Return bytes of a group of layers, recomputed and with merged matrices (twice, fp32), or of a chunk of logits."""
    config, vocab, sums = program.config, program.model.config.vocab_size, sum_bytes(program)
    axes, leaves, merged = program.placement.mesh.shape, program.placement.leaves, [0]
    chunk = chunk_tokens(tokens // axes["context"], vocab, config.model.hidden_size, config.lora is not None)
    if config.lora is not None:
        adapted = {name: shape for name, shape in shapes(program.model).items() if program.roles[name] in ADAPTED}
        merged = [math.prod(x[1:]) // math.prod(axes[axis] for axis in leaves[name].own) for name, x in adapted.items()]
    return max(recomputed + _gathered_layer(program, single) + 2 * max(merged) * sums, 2 * chunk * vocab * sums)


def _gathered_layer(program: PhaseProgram, single: bool) -> int:
    """Return bytes of the matrices that layers gather, of a period and the next layer, and of a layer's gradients."""
    placement, layers, total = program.placement, len(program.model.config.period), 0.0
    for name, x in local_copies(program).items():
        leaf, trained = placement.leaves[name], name in program.trained
        gathers = leaf.by_layer or (single and leaf.gathered_in_layers and trained)
        whole = math.prod(x.shape[1:]) * (placement.mesh.shape["fsdp"] if leaf.by_layer else 1)
        if gathers:
            total += whole * placement.dtypes[name].itemsize * (1 + 1 / layers)
        if trained and (gathers or leaf.reduced_in_layers):
            total += whole * 3 * sum_bytes(program) / layers
    return int(total)
