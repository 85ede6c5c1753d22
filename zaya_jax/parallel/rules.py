"""The sharding rules: one table from parameter names and roles to `PartitionSpec`.

Master weights and optimizer state are sharded over all devices of the job, along the larger of a parameter's last two
axes that the number of devices divides. If it divides neither, fewer mesh axes are used. The axis of stacked layers is
never sharded, since numbers such as 40 layers rarely divide.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from zaya_jax.model.layers import Role
from zaya_jax.model.tree import is_stacked
from zaya_jax.parallel.mesh import STORED_OVER, AnyMesh, nontrivial_axes


class LeafPlacement(NamedTuple):
    """The sharding of one parameter.

    Attributes:
      stored: partition of the master weights, their gradient and the optimizer state.
      axis: the sharded axis, counted from the end (negative); None if there is none.
      over: mesh axes that `axis` is sharded over.
      own: mesh axes along which the compute copy stays sharded: `expert` for experts.
      by_layer: whether it is gathered over fsdp one layer at a time, in the loop over layers.
      exact: whether the compute copy stays in the master weights' dtype, because its gradient is a sum over devices or
        tokens that the compute dtype would round.
    """

    stored: PartitionSpec
    axis: int | None
    over: tuple[str, ...]
    own: tuple[str, ...]
    by_layer: bool
    exact: bool

    @property
    def gathered(self) -> tuple[str, ...]:
        """Mesh axes over which the compute copy is gathered once a step."""
        return tuple(axis for axis in self.over if not (self.by_layer and axis == "fsdp"))

    @property
    def split(self) -> tuple[str, ...]:
        """All mesh axes that it is sharded over."""
        return (*self.own, *self.over)


def place_leaves(
    shapes: Mapping[str, tuple[int, ...]], roles: Mapping[str, Role], mesh: AnyMesh
) -> dict[str, LeafPlacement]:
    """Return the placement of every parameter.

    Args:
      shapes: shape of each parameter, by name.
      roles: role of each parameter, by name.
      mesh: the mesh; axes of size 1 are ignored.
    """
    return {name: _place(name, shape, roles[name], mesh) for name, shape in shapes.items()}


def _place(name: str, shape: tuple[int, ...], role: Role, mesh: AnyMesh) -> LeafPlacement:
    layered, own = is_stacked(name), nontrivial_axes(mesh, ["expert"] if role == "expert" else [])
    stack = layered + (role == "expert")
    over = nontrivial_axes(mesh, [axis for axis in STORED_OVER if axis not in own])
    candidates = sorted(range(-min(2, len(shape) - stack), 0), key=lambda axis: shape[axis], reverse=True)
    axis = None
    while over and axis is None:
        parts = math.prod(mesh.shape[name] for name in over)
        axis = next((index for index in candidates if shape[index] % parts == 0), None)
        over = over if axis is not None else over[:-1]
    spec: list[Any] = [None] * len(shape)
    if axis is not None:
        spec[axis] = over
    if own:
        spec[stack - 1] = "expert"
    by_layer = layered and "fsdp" in over
    return LeafPlacement(PartitionSpec(*spec), axis, over, own, by_layer, by_layer or role == "embedding")


def state_shardings(state: Any, leaves: Mapping[str, LeafPlacement], mesh: AnyMesh) -> Any:
    """Return the sharding of every leaf of a training state.

    A leaf under a parameter's name and of its rank, such as momentum or second moment, is sharded like the parameter;
    everything else, such as counters and balancing biases, is replicated.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        spec = next((leaves[name].stored for name in names if name in leaves), PartitionSpec())
        return NamedSharding(mesh, spec if len(spec) == len(leaf.shape) else PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, state)
