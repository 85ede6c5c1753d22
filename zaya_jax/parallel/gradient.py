"""The gradient region: one `shard_map`, in which everything sees local shapes.

Master weights enter as each device stores them. Cast to the compute dtype they are gathered, once a step; layers under
FSDP stay in parts, which the loop over layers gathers one at a time. Each device adds up the gradients of its
micro-batches in fp32, and only then are they summed over devices, each device keeping the part it stores: left
to the compiler's own partitioning, an all-reduce would stand inside the loop for every layer of every
micro-batch. Local functions return sums, which are divided once by the count of all devices.

Parameters that are not trained, under adapters, enter beside those that are: as each device stores them, but in
the compute dtype, and without a gradient.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zaya_jax.config.parallel import Reduce
from zaya_jax.model.tree import Arrays
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.parallel.collectives import sum_scatter
from zaya_jax.parallel.mesh import AXES, AnyMesh, batch_spec, nontrivial_axes
from zaya_jax.parallel.rules import LeafPlacement

Sums = Any
LocalLoss = Callable[[Any, Any, Any], tuple[jax.Array, Sums]]


class Reduction(NamedTuple):
    """The collectives that bring the gradient of one parameter from the devices' own sums to where it is stored.

    Attributes:
      scatter: mesh axes of the reduce-scatter along the parameter's split axis; empty where there is none.
      sum: mesh axes of the all-reduce that follows; empty where there is none.
    """

    scatter: tuple[str, ...]
    sum: tuple[str, ...]


def reduction(leaf: LeafPlacement, mesh: AnyMesh) -> Reduction:
    """The collectives of a parameter's gradient, beside those of its layer (`layers.gather_layer`)."""
    return Reduction(leaf.gathered, tuple(axis for axis in nontrivial_axes(mesh, AXES) if axis not in leaf.split))


def summed_gradient(
    local_loss: LocalLoss, mesh: AnyMesh, leaves: Mapping[str, LeafPlacement], dtypes: Mapping[str, Any], reduce: Reduce
) -> Callable[..., tuple[Sums, Arrays]]:
    """Gradient of the summed loss over all micro-batches and devices.

    Args:
      local_loss: (compute copy of all parameters, constants, micro-batch) → (scalar sum to differentiate in the
        trained ones of the first, further sums).
      mesh: where it runs.
      leaves: the placement of each parameter.
      dtypes: that each parameter computes in.
      reduce: whether gradients are summed over devices once, or after each micro-batch.

    Returns:
      (params, constants, batch with leaves [micro-batches, sequences, tokens], frozen parameters or None) → (sums,
      gradient), the sums of `local_loss` and the gradient of its scalar in the master weights' dtype, added over
      everything and placed like the master weights.
    """
    reduce_axes = nontrivial_axes(mesh, AXES)

    def region(params: Arrays, constants: Any, batch: Any, frozen: Arrays) -> tuple[Sums, Arrays]:
        compute, frozen_compute = compute_copy(params, leaves, dtypes), frozen_copy(frozen, leaves)
        gradient = jax.grad(lambda copy, *rest: local_loss({**frozen_compute, **copy}, *rest), has_aux=True)

        def accumulated(micro: Any) -> tuple[Arrays, Sums]:
            grads, sums = gradient(compute, constants, micro)
            return to_accumulator(grads, leaves, mesh, reduce), sums

        def add(total: Any, micro: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, accumulated(micro)), None

        first = accumulated(jax.tree.map(lambda x: x[0], batch))
        rest = jax.tree.map(lambda x: x[1:], batch)
        (grads, sums), _ = jax.lax.scan(add, first, rest)
        if reduce_axes:
            sums = jax.lax.psum(sums, reduce_axes)
        return sums, grads if reduce == "micro_batch" else _to_stored(grads, leaves, mesh)

    return _mapped(region, mesh, leaves, batch_spec(leading=1), gradient=True)


def summed(
    local_sums: Callable[[Arrays, Any, Any], Sums], mesh: AnyMesh, leaves: Mapping[str, LeafPlacement],
    dtypes: Mapping[str, Any],
) -> Callable[..., Sums]:  # fmt: skip
    """(params, constants, batch with leaves [sequences, tokens], frozen parameters or None) → the sums over devices."""
    reduce_axes = nontrivial_axes(mesh, AXES)

    def region(params: Arrays, constants: Any, batch: Any, frozen: Arrays) -> Sums:
        copy = {**frozen_copy(frozen, leaves), **compute_copy(params, leaves, dtypes)}
        sums = local_sums(copy, constants, batch)
        return jax.lax.psum(sums, reduce_axes) if reduce_axes else sums

    return _mapped(region, mesh, leaves, batch_spec(), gradient=False)


def _mapped(
    region: Callable[..., Any], mesh: AnyMesh, leaves: Mapping[str, LeafPlacement], batch_split: PartitionSpec, *,
    gradient: bool,
) -> Callable[..., Any]:  # fmt: skip
    """`region` over the mesh: every parameter as it is stored, and sums, which every device has, beside a gradient."""

    def mapped(params: Arrays, constants: Any, batch: Any, frozen: Arrays | None = None) -> Any:
        stored, frozen_stored = ({name: leaves[name].stored for name in names} for names in (params, frozen or {}))
        # check_vma would refuse kernels, whose outputs carry no varying axes; sums therefore stay out of what is
        # differentiated, since unchecked they transpose to sums.
        mapped_region = jax.shard_map(
            region, mesh=mesh, in_specs=(stored, PartitionSpec(), batch_split, frozen_stored),
            out_specs=(PartitionSpec(), stored) if gradient else PartitionSpec(), check_vma=False,
        )  # fmt: skip
        return mapped_region(params, constants, batch, frozen or {})

    return mapped


def compute_copy(params: Arrays, leaves: Mapping[str, LeafPlacement], dtypes: Mapping[str, Any]) -> Arrays:
    """From what a device stores to what it computes with, inside the region.

    Layers that are gathered one at a time come out in the master weights' dtype, rounded to the compute dtype where
    parts were gathered: their gradients are summed over fsdp, and that sum is to be exact. So is the
    embedding, whose gradients by the lookup and by the head are sums over all tokens.
    """

    def copy(name: str, x: jax.Array) -> jax.Array:
        leaf, dtype = leaves[name], dtypes[name]
        if not leaf.gathered:
            return x if leaf.exact else x.astype(dtype)
        x = _gather(leaf, x.astype(dtype))
        return x.astype(accumulation_dtype(dtype)) if leaf.exact else x

    return {name: copy(name, x) for name, x in params.items()}


def frozen_copy(frozen: Arrays, leaves: Mapping[str, LeafPlacement]) -> Arrays:
    """From what a device stores of parameters that are not trained to what it computes with, inside the region.

    They are stored in the compute dtype, and nothing is summed that would want more.
    """
    return {name: _gather(leaves[name], x) for name, x in frozen.items()}


def to_accumulator(grads: Arrays, leaves: Mapping[str, LeafPlacement], mesh: AnyMesh, reduce: Reduce) -> Arrays:
    """What is added up over micro-batches, of the gradients of one: in fp32, reduced already where that is wanted."""
    grads = {name: g.astype(accumulation_dtype(g.dtype)) for name, g in grads.items()}
    return _to_stored(grads, leaves, mesh) if reduce == "micro_batch" else grads


def _gather(leaf: LeafPlacement, x: jax.Array) -> jax.Array:
    if leaf.axis is None or not leaf.gathered:
        return x
    return jax.lax.all_gather(x, leaf.gathered, axis=x.ndim + leaf.axis, tiled=True)


def _to_stored(grads: Arrays, leaves: Mapping[str, LeafPlacement], mesh: AnyMesh) -> Arrays:
    def reduced(leaf: LeafPlacement, g: jax.Array) -> jax.Array:
        scatter, others = reduction(leaf, mesh)
        if scatter and leaf.axis is not None:
            g = sum_scatter(g, scatter, g.ndim + leaf.axis)
        return jax.lax.psum(g, others) if others else g

    return {name: reduced(leaves[name], g) for name, g in grads.items()}
