"""The gradient region: one `shard_map` over the mesh, in which all code sees local shapes.

Master weights enter sharded. They are cast to the compute dtype and gathered once a step; layers under FSDP stay
sharded, and the loop over layers gathers them one at a time. Each device accumulates the gradients of its micro-batches
in fp32 (`accumulation`). Only then are they reduce-scattered: the compiler's automatic partitioning would put an
all-reduce inside the loop, for every layer of every micro-batch. Local functions return sums, which are divided once by
the global count.

Frozen parameters under adapters enter next to the trained ones, sharded, in the compute dtype and without a gradient.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zaya_jax.config.parallel import Reduce
from zaya_jax.model.tree import Arrays, is_stacked
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.parallel.accumulation import SMALL, Accumulated
from zaya_jax.parallel.collectives import sum_scatter
from zaya_jax.parallel.mesh import AXES, AnyMesh, batch_spec, nontrivial_axes
from zaya_jax.parallel.rules import LeafPlacement

Sums = Any
LocalLoss = Callable[[Any, Any, Any], tuple[jax.Array, Sums]]


class Reduction(NamedTuple):
    """The collectives that turn each device's gradient of a parameter into the sharded global sum.

    Attributes:
      scatter: mesh axes of the reduce-scatter along the parameter's sharded axis; may be empty.
      sum: mesh axes of the all-reduce that follows; may be empty.
    """

    scatter: tuple[str, ...]
    sum: tuple[str, ...]


def reduction(leaf: LeafPlacement, mesh: AnyMesh) -> Reduction:
    """Return the collectives of a parameter's gradient, without those inside the layer (`layers.gather_layer`)."""
    return Reduction(leaf.gathered, tuple(axis for axis in nontrivial_axes(mesh, AXES) if axis not in leaf.split))


def summed_gradient(
    local_loss: LocalLoss, mesh: AnyMesh, leaves: Mapping[str, LeafPlacement], dtypes: Mapping[str, Any],
    reduce: Reduce, in_place: Collection[str] = (),
) -> Callable[..., tuple[Sums, Arrays]]:  # fmt: skip
    """Make the gradient of the loss, summed over all micro-batches and devices.

    Args:
      local_loss: (compute copy of all parameters, constants, micro-batch) → (scalar loss, sums). The loss is
        differentiated with respect to the trained parameters. Large ones of layers are `Accumulated`.
      mesh: the device mesh.
      leaves: placement of each parameter, by name.
      dtypes: compute dtype of each parameter, by name.
      reduce: whether to sum gradients over devices once a step, or after each micro-batch.
      in_place: names of the layers' parameters that no layer copies, see `Accumulated`.

    Returns:
      A function (params, constants, batch, frozen) → (sums, gradient). The batch's leaves are [micro-batches,
      sequences, tokens]; `frozen` are frozen parameters or None. The gradient has the dtype and the sharding of the
      master weights.
    """
    reduce_axes = nontrivial_axes(mesh, AXES)

    def region(params: Arrays, constants: Any, batch: Any, frozen: Arrays) -> tuple[Sums, Arrays]:
        compute, frozen_compute = compute_copy(params, leaves, dtypes), frozen_copy(frozen, leaves)
        large = {name for name, x in compute.items() if is_stacked(name) and x.size > SMALL * x.shape[0]}
        others = {name: x for name, x in compute.items() if name not in large}
        probe = jnp.zeros((), jnp.float32)

        def add_gradient(total: Arrays, micro: Any) -> tuple[Arrays, Sums]:
            """Add the gradient of a micro-batch to `total`."""
            references = {name: jax.new_ref(total[name]) for name in large}

            def loss(others: Arrays, probe: jax.Array) -> tuple[jax.Array, Sums]:
                layers = {name: Accumulated(compute[name], x, probe, name in in_place)
                          for name, x in references.items()}  # fmt: skip
                return local_loss({**frozen_compute, **layers, **others}, constants, micro)

            (grads, _), sums = jax.grad(loss, argnums=(0, 1), has_aux=True)(others, probe)
            added = {name: total[name] + g.astype(total[name].dtype) for name, g in grads.items()}
            return {**added, **{name: jax.freeze(x) for name, x in references.items()}}, sums

        def add(total: Arrays, micro: Any) -> tuple[Arrays, Sums]:
            if reduce == "step" or not reduce_axes:
                return add_gradient(total, micro)
            grads, sums = add_gradient(_zeros(to_accumulator(compute, leaves, mesh, "step")), micro)
            return jax.tree.map(jnp.add, total, to_accumulator(grads, leaves, mesh, reduce)), sums

        start = jax.eval_shape(lambda: to_accumulator(compute, leaves, mesh, reduce))
        grads, sums = jax.lax.scan(add, _zeros(start), batch)
        sums = jax.tree.map(lambda x: x.sum(0), sums)
        if reduce_axes:
            sums = jax.lax.psum(sums, reduce_axes)
        return sums, grads if reduce == "micro_batch" else _to_stored(grads, leaves, mesh)

    return _mapped(region, mesh, leaves, batch_spec(leading=1), gradient=True)


def summed(
    local_sums: Callable[[Arrays, Any, Any], Sums], mesh: AnyMesh, leaves: Mapping[str, LeafPlacement],
    dtypes: Mapping[str, Any],
) -> Callable[..., Sums]:  # fmt: skip
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
    region: Callable[..., Any], mesh: AnyMesh, leaves: Mapping[str, LeafPlacement], batch_split: PartitionSpec, *,
    gradient: bool,
) -> Callable[..., Any]:  # fmt: skip
    """Wrap `region` in a `shard_map`: parameters and gradient sharded as stored, constants and sums replicated."""

    def mapped(params: Arrays, constants: Any, batch: Any, frozen: Arrays | None = None) -> Any:
        stored, frozen_stored = ({name: leaves[name].stored for name in names} for names in (params, frozen or {}))
        # check_vma rejects kernels, whose outputs have no varying axes. Without it, a psum transposes to a psum, so no
        # psum may be inside of what is differentiated.
        mapped_region = jax.shard_map(
            region, mesh=mesh, in_specs=(stored, PartitionSpec(), batch_split, frozen_stored),
            out_specs=(PartitionSpec(), stored) if gradient else PartitionSpec(), check_vma=False,
        )  # fmt: skip
        return mapped_region(params, constants, batch, frozen or {})

    return mapped


def compute_copy(params: Arrays, leaves: Mapping[str, LeafPlacement], dtypes: Mapping[str, Any]) -> Arrays:
    """Make the parameters that a device computes with from its shards, inside the region.

    Layers that are gathered one at a time, and the embedding, stay in the master weights' dtype (with values rounded to
    the compute dtype if gathered here), so that the sums of their gradients, over fsdp or over all tokens, are in fp32.
    """

    def copy(name: str, x: jax.Array) -> jax.Array:
        leaf, dtype = leaves[name], dtypes[name]
        if not leaf.gathered:
            return x if leaf.exact else x.astype(dtype)
        x = _gather(leaf, x.astype(dtype))
        return x.astype(accumulation_dtype(dtype)) if leaf.exact else x

    return {name: copy(name, x) for name, x in params.items()}


def frozen_copy(frozen: Arrays, leaves: Mapping[str, LeafPlacement]) -> Arrays:
    """Make the frozen parameters that a device computes with from its shards, inside the region.

    They are stored in the compute dtype already, and have no gradients.
    """
    return {name: _gather(leaves[name], x) for name, x in frozen.items()}


def to_accumulator(grads: Arrays, leaves: Mapping[str, LeafPlacement], mesh: AnyMesh, reduce: Reduce) -> Arrays:
    """Convert the gradients of a micro-batch to what is accumulated: fp32, already reduced if `reduce` says so."""
    grads = {name: g.astype(accumulation_dtype(g.dtype)) for name, g in grads.items()}
    return _to_stored(grads, leaves, mesh) if reduce == "micro_batch" else grads


def _zeros(arrays: Mapping[str, Any]) -> Arrays:
    return {name: jnp.zeros(x.shape, x.dtype) for name, x in arrays.items()}


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
