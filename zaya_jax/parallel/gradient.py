"""The gradient region: one `shard_map` over the mesh, in which all code sees local shapes.

Master weights enter sharded. They are cast to the compute dtype and gathered once a step. The loop over layers gathers
layers under FSDP one at a time, and so it does experts in a step of one micro-batch. Each device accumulates the
gradients of its micro-batches in fp32 (`accumulation`), and reduce-scatters them in the last one only: the compiler's
automatic partitioning would put an all-reduce into every layer of every micro-batch. The matrices of a layer are
reduced as soon as its backward pass is done, so that the earlier layers hide it. Local functions return sums, which are
divided once by the global count.

Frozen parameters under adapters enter next to the trained ones, sharded, in the compute dtype and without a gradient.
"""

import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zaya_jax.config.parallel import Reduce
from zaya_jax.model.packing import SMALL
from zaya_jax.model.tree import Arrays, is_stacked
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.ops.stacked import Accumulated, kept_rows
from zaya_jax.parallel.collectives import sum_scatter
from zaya_jax.parallel.layers import Scattered
from zaya_jax.parallel.mesh import AXES, AnyMesh, batch_spec, nontrivial_axes
from zaya_jax.parallel.rules import LeafPlacement

EARLIER = "earlier "  # before a parameter's name: what its gradient continues
Sums = Any
LocalLoss = Callable[[Any, Any, Any], tuple[jax.Array, Sums]]
Leaves = Mapping[str, LeafPlacement]
Names = Collection[str]
Dtypes = Mapping[str, Any]  # compute dtype of each parameter
Parts = dict[str, jax.Array | Scattered]
Loss = Callable[[Any, Any], tuple[jax.Array, Sums]]  # compute copy of the trained parameters, micro-batch


def replicated_over(leaf: LeafPlacement, mesh: AnyMesh) -> tuple[str, ...]:
    """Return the mesh axes of the all-reduce of a parameter's gradient, after the reduce-scatter over `gathered`."""
    return tuple(axis for axis in nontrivial_axes(mesh, AXES) if axis not in leaf.split)


def summed_gradient(
    local_loss: LocalLoss,
    mesh: AnyMesh,
    leaves: Leaves,
    dtypes: Dtypes,
    reduce: Reduce,
    in_place: Names = (),
    keep_rows: bool = False,
    continued: Names = (),
) -> Callable[..., tuple[Sums, Arrays]]:
    """Make the gradient of the loss, summed over all micro-batches and devices.

    It maps (params, constants, batch, frozen) to (sums, gradient). The batch's leaves are [micro-batches, sequences,
    tokens]; `frozen` are frozen parameters or None. The gradient has the dtype and sharding of the master weights.

    `local_loss` maps (compute copy of all parameters, constants, micro-batch) to (scalar loss, sums). It is
    differentiated with respect to the trained parameters, of which large ones of layers are `Accumulated`. `reduce`
    tells whether to sum gradients over devices once a step or after each micro-batch; `in_place` names the layers'
    parameters that no layer copies; `keep_rows` whether there is space for their products with tokens, see `kept_rows`.
    `continued` names parameters whose gradient `local_loss` continues: if its first argument has `EARLIER` + name, the
    sum of earlier ones and the parameter in its compute dtype, the gradient includes that sum.
    """
    reduce_axes = nontrivial_axes(mesh, AXES)

    def region(params: Arrays, constants: Any, batch: Any, frozen: Arrays) -> tuple[Sums, Arrays]:
        micro_batches = jax.tree.leaves(batch)[0].shape[0]
        compute = compute_copy(params, leaves, dtypes, micro_batches == 1)
        frozen_compute = frozen_copy(frozen, leaves)

        def loss(trained: Any, micro: Any) -> tuple[jax.Array, Sums]:
            return local_loss({**frozen_compute, **trained}, constants, micro)

        def reduced(micro: Any, totals: Arrays | None = None) -> tuple[Arrays, Sums]:
            """Return the gradient of a micro-batch, and of those before it, summed over devices."""
            parts = scatter_in_layers(compute, totals, leaves, mesh, micro_batches == 1)
            in_layers = {name: x for name, x in parts.items() if isinstance(x, Scattered)}

            def with_shards(shards: Arrays) -> tuple[jax.Array, Sums]:
                scattered = {name: x._replace(shard=shards[name]) for name, x in in_layers.items()}
                return loss({**shards, **scattered}, micro)

            grads, sums = jax.grad(with_shards, has_aux=True)(differentiated(parts))
            return reduce_rest(grads, parts, totals, leaves, mesh), sums

        kept = in_place if keep_rows and mesh.shape["expert"] == 1 else ()  # else experts get tokens of other devices
        continuing = {name: compute[name].astype(dtypes[name]) for name in continued if name in compute}
        accumulated = functools.partial(_accumulated_gradient, loss, compute, leaves, in_place, kept, continuing)
        if reduce_axes and micro_batches == 1:
            grads, sums = reduced(jax.tree.map(lambda x: x[0], batch))
        elif reduce_axes and reduce == "micro_batch":
            grads, sums = _added(reduced, batch)
        elif any(leaf.reduced_in_layers for leaf in leaves.values()):
            grads, sums = accumulated(jax.tree.map(lambda x: x[:-1], batch))
            grads, last = reduced(_ordered_after(sums, jax.tree.map(lambda x: x[-1], batch)), grads)
            sums = jax.tree.map(jnp.add, sums, last)
        else:
            grads, sums = accumulated(batch)
            grads = {name: _to_stored(g, leaves[name], mesh) for name, g in grads.items()}
        return jax.lax.psum(sums, reduce_axes) if reduce_axes else sums, grads

    return _mapped(region, mesh, leaves, batch_spec(leading=1), gradient=True)


def _accumulated_gradient(
    loss: Loss, compute: Arrays, leaves: Leaves, in_place: Names, kept: Names, continued: Arrays, batch: Any
) -> tuple[Arrays, Sums]:
    """Add up the gradients of micro-batches on this device."""
    # The sums of layers that are gathered one at a time are left to autodiff: they are small, and a sum in place
    # would have to wait for the layer's reduction.
    stacked = {name: x for name, x in compute.items() if is_stacked(name) and not leaves[name].by_layer}
    large = [name for name, x in stacked.items() if x.size > SMALL * x.shape[0]]
    others = {name: x for name, x in compute.items() if name not in large}
    probe, tokens = jnp.zeros((), jnp.float32), math.prod(jax.tree.leaves(batch)[0].shape[1:])

    def accumulating(name: str, total: jax.Ref, probe: jax.Array) -> Accumulated:
        space = kept_rows(compute[name], tokens) if name in kept else None
        return Accumulated(compute[name], total, probe, name in in_place, space)

    def add_gradient(total: Arrays, micro: Any) -> tuple[Arrays, Sums]:
        references = {name: jax.new_ref(total[name]) for name in large}
        earlier = {EARLIER + name: (total[name], x) for name, x in continued.items()}

        def with_totals(others: Arrays, probe: jax.Array) -> tuple[jax.Array, Sums]:
            layers = {name: accumulating(name, x, probe) for name, x in references.items()}
            return loss({**layers, **others, **earlier}, micro)

        (grads, _), sums = jax.grad(with_totals, argnums=(0, 1), has_aux=True)(others, probe)
        added = {name: g.astype(total[name].dtype) for name, g in grads.items()}
        added |= {name: total[name] + g for name, g in added.items() if name not in continued}
        return {**added, **{name: jax.freeze(x) for name, x in references.items()}}, sums

    zeros = {name: jnp.zeros(x.shape, accumulation_dtype(x.dtype)) for name, x in compute.items()}
    count = jax.tree.leaves(batch)[0].shape[0]
    if count == 1 or not any(leaf.by_layer for leaf in leaves.values()):
        grads, sums = jax.lax.scan(add_gradient, zeros, batch)
        return grads, jax.tree.map(lambda x: x.sum(0), sums)

    # XLA unrolls all loops whose count it knows if presets tell it to unroll that of the layers, but this one would
    # take up to a quarter more memory.
    add_micro_batch = jax.jit(add_gradient, inline=True)  # which is traced once for its shapes and the loop

    def add(index: jax.Array, totals: tuple[Arrays, Sums]) -> tuple[Arrays, Sums]:
        grads, sums = add_micro_batch(totals[0], jax.tree.map(lambda x: x[index], batch))
        return grads, jax.tree.map(jnp.add, totals[1], sums)

    first = jax.tree.map(lambda x: x[0], batch)
    no_sums = jax.tree.map(jnp.zeros_like, jax.eval_shape(add_micro_batch, zeros, first)[1])
    with jax.named_scope(f"micro_batches_{count}"):  # for `lab.predict.compilers.hlo`
        return jax.lax.fori_loop(0, jax.lax.optimization_barrier(count), add, (zeros, no_sums))


def summed(local_sums: Callable[..., Sums], mesh: AnyMesh, leaves: Leaves, dtypes: Dtypes) -> Callable[..., Sums]:
    """Make a function (params, constants, batch, frozen) → the sums of `local_sums` over all devices.

    The batch's leaves are [sequences, tokens]; `frozen` are frozen parameters or None.
    """
    reduce_axes = nontrivial_axes(mesh, AXES)

    def region(params: Arrays, constants: Any, batch: Any, frozen: Arrays) -> Sums:
        copy = {**frozen_copy(frozen, leaves), **compute_copy(params, leaves, dtypes)}
        sums = local_sums(copy, constants, batch)
        return jax.lax.psum(sums, reduce_axes) if reduce_axes else sums

    return _mapped(region, mesh, leaves, batch_spec(), gradient=False)


def _mapped(
    region: Callable[..., Any], mesh: AnyMesh, leaves: Leaves, batch_split: PartitionSpec, *, gradient: bool
) -> Callable[..., Any]:
    """Wrap `region` in a `shard_map`: parameters and gradient sharded as stored, constants and sums replicated."""

    def mapped(params: Arrays, constants: Any, batch: Any, frozen: Arrays | None = None) -> Any:
        stored, frozen_stored = ({name: leaves[name].stored for name in names} for names in (params, frozen or {}))
        # check_vma rejects kernels, whose outputs have no varying axes. Without it, a psum transposes to a psum, so no
        # psum may be inside of what is differentiated.
        in_specs = (stored, PartitionSpec(), batch_split, frozen_stored)
        out_specs = (PartitionSpec(), stored) if gradient else PartitionSpec()
        mapped_region = jax.shard_map(region, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
        return mapped_region(params, constants, batch, frozen or {})

    return mapped


def compute_copy(params: Arrays, leaves: Leaves, dtypes: Dtypes, one_micro_batch: bool = False) -> Arrays:
    """Make the parameters that a device computes with from its shards, inside the region.

    Layers that are gathered one at a time, and the embedding, stay in the master weights' dtype (with values rounded to
    the compute dtype if gathered here), so that the sums of their gradients, over fsdp or over all tokens, are in fp32.
    In a step of `one_micro_batch`, experts stay sharded, since none is read twice; `scatter_in_layers` lets the layers
    gather them. The other matrices are small, and the first product of a layer would wait for them behind its experts.
    """

    def copy(name: str, x: jax.Array) -> jax.Array:
        leaf, dtype = leaves[name], dtypes[name]
        exact = leaf.by_layer or leaf.role == "embedding"
        if not leaf.gathered or (leaf.gathered_in_layers and one_micro_batch):
            return x if exact else x.astype(dtype)
        x = _gather(leaf, x.astype(dtype))
        return x.astype(accumulation_dtype(dtype)) if exact else x

    return {name: copy(name, x) for name, x in params.items()}


def frozen_copy(frozen: Arrays, leaves: Leaves) -> Arrays:
    """Make the frozen parameters that a device computes with from its shards, inside the region.

    They are stored in the compute dtype already, and have no gradients.
    """
    return {name: _gather(leaves[name], x) for name, x in frozen.items()}


def scatter_in_layers(
    compute: Arrays, totals: Arrays | None, leaves: Leaves, mesh: AnyMesh, one_micro_batch: bool = False
) -> Parts:
    """Make the layers' matrices in a `compute_copy` `Scattered`, with the sums of earlier gradients, if any."""

    def scattered(name: str, x: jax.Array) -> jax.Array | Scattered:
        leaf = leaves[name]
        if not leaf.reduced_in_layers:
            return x
        ((axis, over),) = leaf.gathers
        shape = list(x.shape)
        if not (one_micro_batch and leaf.gathered_in_layers):  # which are sharded already
            shape[axis] //= math.prod(mesh.shape[name] for name in over)
        total = None if totals is None else totals[name]
        return Scattered(x, total, jnp.zeros(shape, accumulation_dtype(x.dtype)))

    return {name: scattered(name, x) for name, x in compute.items()}


def differentiated(parts: Parts) -> Arrays:
    """Return the arrays that the loss is differentiated with respect to."""
    return {name: x.shard if isinstance(x, Scattered) else x for name, x in parts.items()}


def reduce_rest(grads: Arrays, parts: Parts, totals: Arrays | None, leaves: Leaves, mesh: AnyMesh) -> Arrays:
    """Reduce the gradients that the layers have not reduced, after adding those of earlier micro-batches."""

    def reduce_leaf(name: str, g: jax.Array) -> jax.Array:
        if isinstance(parts[name], Scattered):
            return _replicas(g, leaves[name], mesh)
        g = g.astype(accumulation_dtype(g.dtype))
        return _to_stored(g if totals is None else totals[name] + g, leaves[name], mesh)

    return {name: reduce_leaf(name, g) for name, g in grads.items()}


def _added(function: Callable[[Any], Any], batch: Any) -> Any:
    """Add up the results of `function` for each micro-batch."""

    def add(total: Any, micro: Any) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(micro)), None

    first = function(jax.tree.map(lambda x: x[0], batch))
    return jax.lax.scan(add, first, jax.tree.map(lambda x: x[1:], batch))[0]


def _ordered_after(sums: Sums, batch: Any) -> Any:
    """Return `batch`, whose integers depend on `sums`.

    XLA would run the forward pass of the last micro-batch ahead of the loop over the others, and keep its results. It
    still clears the memory for them there.
    """
    never = jax.tree.leaves(sums)[0].reshape(-1)[0].astype(jnp.float32) < -jnp.inf
    return jax.tree.map(lambda x: x + never.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.integer) else x, batch)


def _gather(leaf: LeafPlacement, x: jax.Array) -> jax.Array:
    def gather(x: jax.Array) -> jax.Array:
        for axis, over in leaf.gathers:
            x = jax.lax.all_gather(x, over, axis=x.ndim + axis, tiled=True)
        return x

    if not leaf.gathered_in_layers:
        return gather(x)
    # Of all layers at once, experts would be gathered in the order of the devices, and then transposed: both in memory.
    # On CPUs, devices would run the collectives of loops in different orders, and wait for each other forever.
    return jax.lax.platform_dependent(x, cpu=gather, default=functools.partial(jax.lax.map, gather))


def _to_stored(g: jax.Array, leaf: LeafPlacement, mesh: AnyMesh) -> jax.Array:
    for axis, over in leaf.gathers:
        g = sum_scatter(g, over, g.ndim + axis)
    return _replicas(g, leaf, mesh)


def _replicas(g: jax.Array, leaf: LeafPlacement, mesh: AnyMesh) -> jax.Array:
    """Add up the gradients of what is replicated."""
    others = replicated_over(leaf, mesh)
    return jax.lax.psum(g, others) if others else g
