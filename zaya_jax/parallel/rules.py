"""Where each parameter is: the one table from names and roles to `PartitionSpec`.

What stays between steps (master weights, momentum, second moments) is split over every device of the job, along the
larger of a leaf's last two axes that the devices divide. Never along a stack of layers: the vocabulary of
262,272 = 128 × 2,049 or 40 layers need not divide by anything, and where one axis does not, another does.
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
    """Where one parameter is.

    Attributes:
      stored: split of the master weights, of their gradient and of the optimizer's state.
      axis: the axis that is split, counted from the last (negative); None where none is.
      over: mesh axes that `axis` is split over.
      own: mesh axes along which devices compute with parts of their own: with their experts along `expert`.
      by_layer: whether it is gathered over fsdp layer by layer, in the loop over layers.
      exact: whether the compute copy stays in the master weights' dtype, since its gradient is a sum over devices or
        tokens that its own would round.
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
        """All mesh axes that it is split over."""
        return (*self.own, *self.over)


def place_leaves(
    shapes: Mapping[str, tuple[int, ...]], roles: Mapping[str, Role], mesh: AnyMesh
) -> dict[str, LeafPlacement]:
    """The placement of every parameter.

    Args:
      shapes: of parameters, by name.
      roles: theirs.
      mesh: any; axes of one device count for nothing.
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
    """The sharding of every leaf of a training state.

    A leaf that stands under a parameter's name and has its rank is split as the parameter is (so are momentum
    and second moments); everything else, counters and balancing biases, is on every device.
    """

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        names = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        spec = next((leaves[name].stored for name in names if name in leaves), PartitionSpec())
        return NamedSharding(mesh, spec if len(spec) == len(leaf.shape) else PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, state)
