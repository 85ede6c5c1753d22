"""The gradient region: one `shard_map`, in which everything sees local shapes.

Masters enter as each device stores them. Cast to the compute dtype they are gathered, once a step; layers under
FSDP stay in parts, which the loop over layers gathers one at a time. Each device adds up the gradients of its
micro-batches in fp32, and only then are they summed over devices, each device keeping the part it stores: left
to the compiler's own partitioning, an all-reduce would stand inside the loop for every layer of every
micro-batch. Local functions return sums, which are divided once by the count of all devices.

Parameters that are not trained, under adapters, enter beside those that are: as each device stores them, but in
the compute dtype, and without a gradient.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zaya_jax.config.parallel import Reduce
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.parallel.collectives import sum_scatter
from zaya_jax.parallel.mesh import AXES, AnyMesh, batch_spec, nontrivial_axes
from zaya_jax.parallel.rules import Placement

Arrays = dict[str, jax.Array]
Sums = Any
LocalLoss = Callable[[Any, Any, Any], tuple[jax.Array, Sums]]


def summed_gradient(
    local_loss: LocalLoss, mesh: AnyMesh, placed: Mapping[str, Placement], dtypes: Mapping[str, Any], reduce: Reduce
) -> Callable[..., tuple[Sums, Arrays]]:
    """Gradient of the summed loss over all micro-batches and devices.

    Args:
      local_loss: (compute copy of all parameters, constants, micro-batch) → (scalar sum to differentiate in the
        trained ones of the first, further sums).
      mesh: where it runs.
      placed: of each parameter.
      dtypes: that each parameter computes in.
      reduce: whether gradients are summed over devices once, or after each micro-batch.

    Returns:
      (params, constants, batch with leaves [micro-batches, sequences, tokens], frozen parameters or None) → (sums,
      gradient), the sums of `local_loss` and the gradient of its scalar in the masters' dtype, added over
      everything and placed like the masters.
    """
    everywhere = nontrivial_axes(mesh, AXES)

    def region(params: Arrays, constants: Any, batch: Any, frozen: Arrays) -> tuple[Sums, Arrays]:
        compute, still = compute_copy(params, placed, dtypes), frozen_copy(frozen, placed)
        gradient = jax.grad(lambda copy, *rest: local_loss({**still, **copy}, *rest), has_aux=True)

        def one(micro: Any) -> tuple[Arrays, Sums]:
            grads, sums = gradient(compute, constants, micro)
            grads = {name: g.astype(accumulation_dtype(g.dtype)) for name, g in grads.items()}
            return (_to_stored(grads, placed, mesh) if reduce == "micro_batch" else grads), sums

        def add(total: Any, micro: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, one(micro)), None

        first = one(jax.tree.map(lambda x: x[0], batch))
        rest = jax.tree.map(lambda x: x[1:], batch)
        (grads, sums), _ = jax.lax.scan(add, first, rest)
        if everywhere:
            sums = jax.lax.psum(sums, everywhere)
        return sums, grads if reduce == "micro_batch" else _to_stored(grads, placed, mesh)

    def everything(params: Arrays, constants: Any, batch: Any, frozen: Arrays | None = None) -> tuple[Sums, Arrays]:
        stored, still = ({name: placed[name].stored for name in some} for some in (params, frozen or {}))
        # check_vma would refuse kernels, whose outputs carry no varying axes; sums therefore stay out of what is
        # differentiated, since unchecked they transpose to sums.
        mapped = jax.shard_map(
            region, mesh=mesh, in_specs=(stored, PartitionSpec(), batch_spec(leading=1), still),
            out_specs=(PartitionSpec(), stored), check_vma=False,
        )  # fmt: skip
        return mapped(params, constants, batch, frozen or {})

    return everything


def summed(
    local_sums: Callable[[Arrays, Any, Any], Sums], mesh: AnyMesh, placed: Mapping[str, Placement],
    dtypes: Mapping[str, Any],
) -> Callable[..., Sums]:  # fmt: skip
    """(params, constants, batch with leaves [sequences, tokens], frozen parameters or None) → the sums over devices."""
    everywhere = nontrivial_axes(mesh, AXES)

    def region(params: Arrays, constants: Any, batch: Any, frozen: Arrays) -> Sums:
        copy = {**frozen_copy(frozen, placed), **compute_copy(params, placed, dtypes)}
        sums = local_sums(copy, constants, batch)
        return jax.lax.psum(sums, everywhere) if everywhere else sums

    def everything(params: Arrays, constants: Any, batch: Any, frozen: Arrays | None = None) -> Sums:
        stored, still = ({name: placed[name].stored for name in some} for some in (params, frozen or {}))
        mapped = jax.shard_map(region, mesh=mesh, in_specs=(stored, PartitionSpec(), batch_spec(), still),
                               out_specs=PartitionSpec(), check_vma=False)  # fmt: skip
        return mapped(params, constants, batch, frozen or {})

    return everything


def compute_copy(params: Arrays, placed: Mapping[str, Placement], dtypes: Mapping[str, Any]) -> Arrays:
    """From what a device stores to what it computes with, inside the region.

    Layers that are gathered one at a time come out in the masters' dtype, rounded to the compute dtype where
    parts were gathered: their gradients are summed over fsdp, and that sum is to be exact. So is the
    embedding, whose gradients by the lookup and by the head are sums over all tokens.
    """

    def one(name: str, x: jax.Array) -> jax.Array:
        place, dtype = placed[name], dtypes[name]
        exact = place.by_layer or name == "embedding"
        if place.axis is None or not place.gathered:
            return x if exact else x.astype(dtype)
        x = jax.lax.all_gather(x.astype(dtype), place.gathered, axis=x.ndim + place.axis, tiled=True)
        return x.astype(accumulation_dtype(dtype)) if exact else x

    return {name: one(name, x) for name, x in params.items()}


def frozen_copy(frozen: Arrays, placed: Mapping[str, Placement]) -> Arrays:
    """From what a device stores of parameters that are not trained to what it computes with, inside the region.

    They are stored in the compute dtype, and nothing is summed that would want more.
    """

    def one(place: Placement, x: jax.Array) -> jax.Array:
        if place.axis is None or not place.gathered:
            return x
        return jax.lax.all_gather(x, place.gathered, axis=x.ndim + place.axis, tiled=True)

    return {name: one(placed[name], x) for name, x in frozen.items()}


def _to_stored(grads: Arrays, placed: Mapping[str, Placement], mesh: AnyMesh) -> Arrays:
    def one(place: Placement, g: jax.Array) -> jax.Array:
        if place.axis is not None and place.gathered:
            g = sum_scatter(g, place.gathered, g.ndim + place.axis)
        own = {*place.over, *(["expert"] if place.by_expert else [])}
        others = tuple(axis for axis in nontrivial_axes(mesh, AXES) if axis not in own)
        return jax.lax.psum(g, others) if others else g

    return {name: one(placed[name], g) for name, g in grads.items()}
