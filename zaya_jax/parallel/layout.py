"""A layout: how parameters, state, batches and the model's operations lie on the devices of a phase."""

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from zaya_jax.config import ParallelConfig
from zaya_jax.model.layers import Role
from zaya_jax.model.tree import compute_dtypes
from zaya_jax.ops import Ops, ops_for
from zaya_jax.ops.momentum import OnMatrices
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.ops.target import Target, target_of
from zaya_jax.parallel.batch import WHOLE, Share, place_batch
from zaya_jax.parallel.context import gather_sequence, gathered_attention, make_halo, make_mix
from zaya_jax.parallel.experts import gathered_experts, ragged_experts
from zaya_jax.parallel.gradient import LocalLoss, Sums, summed, summed_gradient
from zaya_jax.parallel.layers import gather_layer
from zaya_jax.parallel.mesh import AnyMesh
from zaya_jax.parallel.muon import on_whole_matrices
from zaya_jax.parallel.ring import PartialAttention, ring_attention
from zaya_jax.parallel.rules import Placement, placements, state_shardings


@dataclasses.dataclass(frozen=True)
class Layout:
    """What of the parallel work depends on mesh and parameters.

    Attributes:
      config: degrees, and what travels.
      mesh: of the devices.
      placed: each parameter, by name.
      dtypes: that each parameter computes in.
      target: what is compiled for, and by which kernels; None for a mesh without devices, where none was given.
    """

    config: ParallelConfig
    mesh: AnyMesh
    placed: Mapping[str, Placement]
    dtypes: Mapping[str, Any]
    target: Target | None

    def ops(self) -> Ops:
        """The model's operations on this layout."""
        if self.target is None:
            raise ValueError("A mesh without devices is of no platform: give make_layout the target.")
        base, shape, changes = ops_for(self.target), self.mesh.shape, {}
        changes["gather_layer"] = gather_layer(self.placed, self.dtypes)
        if shape["expert"] > 1:
            ragged = self.config.expert_exchange == "ragged"
            changes["experts"] = (
                ragged_experts(base.experts, jax.lax.ragged_all_to_all, shape["expert"])
                if ragged
                else gathered_experts(base.experts)
            )
        if shape["context"] > 1:
            changes["halo"] = make_halo(self.config)
            changes["cca_mix"] = make_mix(self.config, base.cca_mix)
            if self.config.context_attention == "ring":
                local = PartialAttention(base.attention_part, base.attention_part_gradient)
                changes["attention"] = ring_attention(self.config, local)
            else:
                changes["attention"] = gathered_attention(self.config, base.attention)
                changes["key_segments"] = functools.partial(gather_sequence, self.config)
        return dataclasses.replace(base, **changes)

    def gradient(self, local_loss: LocalLoss) -> Callable[..., tuple[Sums, Any]]:
        """`gradient.summed_gradient` on this layout."""
        return summed_gradient(local_loss, self.mesh, self.placed, self.dtypes, self.config.reduce)

    def sums(self, local_sums: Callable[[Any, Any, Any], Sums]) -> Callable[..., Sums]:
        """`gradient.summed` on this layout."""
        return summed(local_sums, self.mesh, self.placed, self.dtypes)

    @property
    def on_matrices(self) -> OnMatrices:
        """`muon.on_whole_matrices` on this layout."""
        return on_whole_matrices(self.placed, self.mesh)

    def place(
        self, batch: Mapping[str, np.ndarray], micro_batches: int | None = None, share: Share = WHOLE
    ) -> dict[str, jax.Array]:
        """`batch.place_batch` on this layout."""
        return place_batch(batch, self.mesh, self.config, micro_batches, share)

    def shardings(self, state: Any) -> Any:
        """Where each leaf of a training state is."""
        return state_shardings(state, self.placed, self.mesh)


def make_layout(
    config: ParallelConfig, mesh: AnyMesh, shapes: Mapping[str, tuple[int, ...]], roles: Mapping[str, Role],
    dtype: str, exact: Collection[str] = (), target: Target | None = None,
) -> Layout:  # fmt: skip
    """The layout of parameters of these shapes and roles on `mesh`, computing in `dtype`, those `exact` in fp32.

    It is for `target`, or for the mesh's first device where None.
    """
    if target is None and not isinstance(mesh, AbstractMesh):
        target = target_of(mesh.devices.flat[0])
    dtypes = {**compute_dtypes(roles, dtype), **dict.fromkeys(exact, accumulation_dtype(dtype))}
    return Layout(config, mesh, placements(shapes, roles, mesh), dtypes, target)
