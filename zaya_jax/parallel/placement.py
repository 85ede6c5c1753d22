"""A placement: how parameters, state and batches are sharded over a mesh, and the operations that match."""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from zaya_jax.config import ModelConfig, ParallelConfig
from zaya_jax.model.layers import Role
from zaya_jax.model.tree import compute_dtypes
from zaya_jax.ops import Ops
from zaya_jax.ops.kernel_table import KernelTable
from zaya_jax.ops.momentum import OnMatrices
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.ops.registry import KernelSelection, select_kernels
from zaya_jax.ops.target import current_target
from zaya_jax.parallel.accumulation import scan_layers
from zaya_jax.parallel.batch import WHOLE, ProcessShare, place_batch, process_share
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
        """The operations of `kernels`, with collectives added where the layout needs them."""
        base, shape, changes = self.kernels.ops, self.mesh.shape, {}
        changes |= {"gather_layer": gather_layer(self.leaves, self.dtypes), "scan_layers": scan_layers}
        if shape["expert"] > 1 and self.config.expert_exchange == "ragged":
            changes["experts"] = ragged_experts(base.experts, jax.lax.ragged_all_to_all, shape["expert"])
        elif shape["expert"] > 1:
            changes["experts"] = gathered_experts(base.experts)
        if shape["context"] > 1:
            changes["halo"] = make_halo(self.config)
            changes["cca_mix"] = make_mix(self.config, base.cca_mix)
            if self.config.context_attention == "ring":
                ring = Ring(self.config, base.partial_attention, base.partial_attention_gradient)
                changes["attention"] = ring_attention(ring)
            else:
                changes["attention"] = gathered_attention(self.config, base.attention)
                changes["key_segments"] = functools.partial(gather_sequence, self.config)
        return dataclasses.replace(base, **changes)

    @functools.cached_property
    def decode_ops(self) -> Ops:
        """The operations of `kernels` for a model that every device has, with caches split over `context`."""
        base, changes = self.kernels.ops, {}
        changes["gather_layer"] = gather_layer(self.leaves, self.dtypes)
        if self.mesh.shape["context"] > 1:
            changes["cached_attention"] = tree_cached_attention(base.partial_attention, base.cached_attention)
        return dataclasses.replace(base, **changes)

    def gradient(self, local_loss: LocalLoss) -> Callable[..., tuple[Sums, Any]]:
        """`gradient.summed_gradient` on this placement."""
        return summed_gradient(
            local_loss, self.mesh, self.leaves, self.dtypes, self.config.gradient_reduction, self.in_place
        )

    def sums(self, local_sums: Callable[[Any, Any, Any], Sums]) -> Callable[..., Sums]:
        """`gradient.summed` on this placement."""
        return summed(local_sums, self.mesh, self.leaves, self.dtypes)

    @property
    def on_matrices(self) -> OnMatrices:
        """`muon.on_whole_matrices` on this placement."""
        return on_whole_matrices(self.leaves, self.mesh)

    def place(
        self, batch: Mapping[str, np.ndarray], micro_batches: int | None = None, share: ProcessShare = WHOLE
    ) -> dict[str, jax.Array]:
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
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree, self.shardings(tree)
        )


def device_bytes(tree: Any) -> int:
    """Return the bytes of one device's shards of abstract arrays."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def device_kernels(
    model: ModelConfig, dtype: str, table: KernelTable | None = None, pinned: Mapping[str, str] | None = None
) -> KernelSelection:
    """Select kernels for the devices of this process, see `registry.select_kernels`."""
    return select_kernels(current_target(), model, dtype, table, pinned)


def make_placement(
    parallel: ParallelConfig, mesh: AnyMesh, shapes: Mapping[str, tuple[int, ...]], roles: Mapping[str, Role],
    dtype: str, kernels: KernelSelection, exact: Collection[str] = (),
) -> Placement:  # fmt: skip
    """Make the placement of parameters on `mesh`.

    Args:
      parallel: the layout.
      mesh: mesh with the axis sizes of `parallel`.
      shapes: shape of each parameter, by name.
      roles: role of each parameter, by name.
      dtype: the compute dtype.
      kernels: implementations of the operations, for the devices of `mesh`.
      exact: names of parameters that compute in fp32 (fp64 if `dtype` is).
    """
    dtypes = {**compute_dtypes(roles, dtype), **dict.fromkeys(exact, accumulation_dtype(dtype))}
    leaves = place_leaves(shapes, roles, mesh)
    merged = bool(exact)  # matrices of experts are computed from their adapters, one layer at a time
    in_place = {name for name, role in roles.items() if role == "expert" and not (leaves[name].by_layer or merged)}
    return Placement(parallel, mesh, leaves, dtypes, kernels, frozenset(in_place))
