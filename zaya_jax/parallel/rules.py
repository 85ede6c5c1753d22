"""Where each parameter is: the one table from names and roles to `PartitionSpec`.

What stays between steps (masters, momentum, second moments) is split over every device of the job, along the
larger of a leaf's last two axes that the devices divide. Never along a stack of layers: the vocabulary of
262,272 = 128 × 2,049 or 40 layers need not divide by anything, and where one axis does not, another does.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from zaya_jax.model.layers import Role
from zaya_jax.parallel.mesh import AnyMesh, nontrivial_axes

# Outermost first: a layer's part along fsdp is what gathering the axes after it gives.
STORED_OVER = ("fsdp", "data", "context", "expert")
LAYERS = "blocks."


class LeafPlacement(NamedTuple):
    """Where one parameter is.

    Attributes:
      stored: split of the master, of its gradient and of the optimizer's state.
      axis: the axis that is split, counted from the last (negative); None where none is.
      over: mesh axes that it is split over.
      by_layer: whether it is gathered over fsdp layer by layer, in the loop over layers.
      by_expert: whether devices along `expert` compute with experts of their own.
    """

    stored: PartitionSpec
    axis: int | None
    over: tuple[str, ...]
    by_layer: bool
    by_expert: bool

    @property
    def gathered(self) -> tuple[str, ...]:
        """Mesh axes over which the compute copy is gathered once a step."""
        return tuple(axis for axis in self.over if not (self.by_layer and axis == "fsdp"))


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
    layered, by_expert = name.startswith(LAYERS), role == "expert" and mesh.shape["expert"] > 1
    stack = layered + (role == "expert")
    over = nontrivial_axes(mesh, [axis for axis in STORED_OVER if not (by_expert and axis == "expert")])
    candidates = sorted(range(-min(2, len(shape) - stack), 0), key=lambda axis: shape[axis], reverse=True)
    axis = None
    while over and axis is None:
        parts = math.prod(mesh.shape[name] for name in over)
        axis = next((index for index in candidates if shape[index] % parts == 0), None)
        over = over if axis is not None else over[:-1]
    spec: list[Any] = [None] * len(shape)
    if axis is not None:
        spec[axis] = over
    if by_expert:
        spec[stack - 1] = "expert"
    return LeafPlacement(PartitionSpec(*spec), axis, over, layered and "fsdp" in over, by_expert)


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
