"""A layout of devices, applied to the model in this order.

1. Master weights and optimizer state are sharded (`rules.place_leaves`, `Placement.shardings`).
2. A batch is split by sequences over the batch axes, and by tokens over `context` (`Placement.place`).
3. Loss and gradient run in one `shard_map` (`Placement.gradient`, `Placement.sums`). It casts and gathers what is
   gathered once a step, and sums over micro-batches and devices. Steps 4 to 6 are inside, and see one device's part.
4. `Ops.gather_layer` gathers a layer's matrices when the loop comes to it, merges adapters, and makes the backward pass
   reduce their gradients; `Ops.scan_layers` lets layers add the other gradients to their sums in place.
5. `expert`: tokens are sent to the device of their expert and back.
6. `context`: the convolutions get the rows before a piece (its halo), attention the keys of all pieces, by a gather or
   a ring. A decode keeps the slots of caches apart instead (`decode_ops`).
7. Muon exchanges shards for whole matrices (`Placement.on_matrices`).

`parallel.storage` prints what 1, 3 and 4 do with each parameter.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from jax.sharding import AbstractMesh

from zaya_jax.config import ParallelConfig
from zaya_jax.model.layers import Roles, Shapes
from zaya_jax.model.tree import Arrays, compute_dtypes
from zaya_jax.ops import Ops
from zaya_jax.ops.momentum import OnMatrices
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.ops.registry import KernelSelection
from zaya_jax.parallel.accumulation import scan_layers
from zaya_jax.parallel.batch import WHOLE, Batch, ProcessShare, place_batch, process_share
from zaya_jax.parallel.context import gather_sequence, gathered_attention, make_halo, make_mix
from zaya_jax.parallel.decode import tree_cached_attention
from zaya_jax.parallel.experts import gathered_experts, ragged_experts
from zaya_jax.parallel.gradient import LocalLoss, Sums, summed, summed_gradient
from zaya_jax.parallel.layers import gather_layer
from zaya_jax.parallel.mesh import AnyMesh, make_mesh
from zaya_jax.parallel.muon import on_whole_matrices
from zaya_jax.parallel.ring import Ring, ring_attention
from zaya_jax.parallel.rules import LeafPlacement, place_leaves, state_shardings


@dataclasses.dataclass(frozen=True)
class Placement:
    """Shardings and operations for a mesh. It is hashable, so it can be a static argument of `jit`."""

    config: ParallelConfig  # the layout: size of each axis, and which collectives to use
    mesh: AnyMesh  # the devices, or an abstract mesh
    leaves: Mapping[str, LeafPlacement]  # placement of each parameter, by name
    dtypes: Mapping[str, Any]  # compute dtype of each parameter, by name
    kernels: KernelSelection  # implementations of the operations on one device
    # Names of the layers' parameters that operations read in the stack of all layers.
    in_place: frozenset[str] = frozenset()

    def __hash__(self) -> int:
        return hash((self.config, self.mesh))

    @functools.cached_property
    def ops(self) -> Ops:
        """The operations of `kernels` in the region: steps 4 to 6."""
        gather = gather_layer(self.leaves, self.dtypes)
        ops = dataclasses.replace(self.kernels.ops, gather_layer=gather, scan_layers=scan_layers)
        if self.mesh.shape["expert"] > 1:
            experts = gathered_experts(ops.experts)
            if self.config.expert_exchange == "ragged":
                experts = ragged_experts(ops.experts, jax.lax.ragged_all_to_all, self.mesh.shape["expert"])
            ops = dataclasses.replace(ops, experts=experts)
        if self.mesh.shape["context"] == 1:
            return ops
        ops = dataclasses.replace(ops, halo=make_halo(self.config), cca_mix=make_mix(self.config, ops.cca_mix))
        if self.config.context_attention == "ring":
            ring = Ring(self.config, ops.partial_attention, ops.partial_attention_gradient)
            return dataclasses.replace(ops, attention=ring_attention(ring))
        segments = functools.partial(gather_sequence, self.config)
        return dataclasses.replace(ops, attention=gathered_attention(self.config, ops.attention), key_segments=segments)

    @functools.cached_property
    def decode_ops(self) -> Ops:
        """The operations of `kernels` for a model that every device has, with caches split over `context`."""
        ops = dataclasses.replace(self.kernels.ops, gather_layer=gather_layer(self.leaves, self.dtypes))
        if self.mesh.shape["context"] == 1:
            return ops
        cached = tree_cached_attention(ops.partial_attention, ops.cached_attention)
        return dataclasses.replace(ops, cached_attention=cached, cca_mix_step=None)

    def gradient(
        self, local_loss: LocalLoss, keep_rows: bool = False, continued: Collection[str] = ()
    ) -> Callable[..., tuple[Sums, Any]]:
        """`gradient.summed_gradient` on this placement."""
        reduce = self.config.gradient_reduction
        options = self.in_place, keep_rows, continued
        return summed_gradient(local_loss, self.mesh, self.leaves, self.dtypes, reduce, *options)

    def sums(self, local_sums: Callable[[Any, Any, Any], Sums]) -> Callable[..., Sums]:
        """`gradient.summed` on this placement."""
        return summed(local_sums, self.mesh, self.leaves, self.dtypes)

    @property
    def on_matrices(self) -> OnMatrices:
        """`muon.on_whole_matrices` on this placement."""
        return on_whole_matrices(self.leaves, self.mesh)

    def place(self, batch: Batch, micro_batches: int | None = None, share: ProcessShare = WHOLE) -> Arrays:
        """`batch.place_batch` on this placement."""
        return place_batch(batch, self.mesh, self.config, micro_batches, share)

    @functools.cached_property
    def share(self) -> ProcessShare:
        """`batch.process_share` of this process."""
        return WHOLE if isinstance(self.mesh, AbstractMesh) else process_share(self.mesh)

    def shardings(self, state: Any) -> Any:
        """Return the sharding of each leaf of a training state."""
        return state_shardings(state, self.leaves, self.mesh)

    @property
    def replicated(self) -> "Placement":
        """A placement with the same dtypes and kernels in which one device has all parameters."""
        devices: Any = self.mesh.devices
        alone = make_mesh(devices=[devices.flat[0]])
        return Placement(ParallelConfig(), alone, {}, self.dtypes, self.kernels)

    def abstract(self, tree: Any) -> Any:
        """Return the shape, dtype and sharding of each leaf of a training state, which may be abstract."""
        struct = jax.ShapeDtypeStruct
        return jax.tree.map(lambda x, on: struct(x.shape, x.dtype, sharding=on), tree, self.shardings(tree))


def device_bytes(tree: Any) -> int:
    """Return the bytes of one device's shards of abstract arrays."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def make_placement(
    parallel: ParallelConfig,
    mesh: AnyMesh,
    shapes: Shapes,
    roles: Roles,
    dtype: str,
    kernels: KernelSelection,
    exact: Collection[str] = (),
) -> Placement:
    """Make the placement of parameters, by name, on a mesh with the axis sizes of the layout.

    `dtype` is the compute dtype; the parameters named in `exact` compute in fp32 (fp64 if `dtype` is).
    """
    dtypes = {**compute_dtypes(roles, dtype), **dict.fromkeys(exact, accumulation_dtype(dtype))}
    leaves = place_leaves(shapes, roles, mesh)
    merged = bool(exact)  # matrices of experts are computed from their adapters, one layer at a time
    in_place = {name for name, role in roles.items() if role == "expert" and not (leaves[name].by_layer or merged)}
    return Placement(parallel, mesh, leaves, dtypes, kernels, frozenset(in_place))
