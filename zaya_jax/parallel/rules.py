"""The sharding rules: one table from parameter names and roles to `PartitionSpec`.

Master weights and optimizer state are sharded over all devices of the job: experts along the axis of experts, if their
number is a multiple of the devices (or of `fsdp` alone), because whole matrices are gathered without a transpose and
Muon need not exchange them; everything else along the larger of its last two axes that the number of devices divides.
If it divides neither, fewer mesh axes are used, with fsdp if it divides: over the others the parameter is replicated.
The axis of stacked layers is never sharded, since numbers such as 40 layers rarely divide.
"""

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from zaya_jax.model.layers import MATRIX_ROLES, Role, Roles, Shapes
from zaya_jax.model.tree import is_stacked
from zaya_jax.parallel.mesh import STORED_OVER, AnyMesh, nontrivial_axes


class LeafPlacement(NamedTuple):
    """The sharding of one parameter."""

    stored: PartitionSpec  # partition of the master weights, their gradient and the optimizer state
    # The sharded axis of its matrices or vectors, counted from the end (negative); None if there is none.
    axis: int | None
    over: tuple[str, ...]  # mesh axes that `axis` is sharded over
    own: tuple[str, ...]  # mesh axes along which the compute copy stays sharded: `expert` for experts
    experts_over: tuple[str, ...]  # mesh axes that the axis of experts is sharded over, inside `own`
    # The loop over layers hides the collectives of `MATRIX_ROLES`, whose parameters are stacks of the layers' matrices.
    # Experts are nearly all of a layer's bytes. Vectors are not worth it, since those of all layers take a few MB.
    role: Role

    @property
    def gathers(self) -> tuple[tuple[int, tuple[str, ...]], ...]:
        """(axis, mesh axes) of the all-gather that makes the compute copy once a step; at most one."""
        splits = ((EXPERTS_AXIS, self.experts_over), (self.axis, self.over))
        once = ((axis, tuple(x for x in over if not (self.by_layer and x == "fsdp"))) for axis, over in splits)
        return tuple((axis, over) for axis, over in once if axis is not None and over)

    @property
    def gathered(self) -> tuple[str, ...]:
        """Mesh axes over which the compute copy is gathered once a step."""
        return tuple(axis for _, over in self.gathers for axis in over)

    @property
    def by_layer(self) -> bool:
        """True if it is gathered over fsdp one layer at a time, in the loop over layers."""
        return self.role in MATRIX_ROLES and "fsdp" in self.split

    @property
    def reduced_in_layers(self) -> bool:
        """True if the layers reduce the gradient of what is gathered once a step."""
        return self.role in MATRIX_ROLES and bool(self.gathers)

    @property
    def gathered_in_layers(self) -> bool:
        """True if the layers gather it, instead of the step, if there is a single micro-batch."""
        return self.role == "expert" and bool(self.gathers)

    @property
    def layer_axis(self) -> int | None:
        """The axis that is gathered over fsdp one layer at a time; None if there is none."""
        return None if not self.by_layer else EXPERTS_AXIS if "fsdp" in self.experts_over else self.axis

    @property
    def split(self) -> tuple[str, ...]:
        """All mesh axes that it is sharded over."""
        return (*self.own, *self.experts_over, *self.over)


EXPERTS_AXIS = -3  # of a stack of matrices


def place_leaves(shapes: Shapes, roles: Roles, mesh: AnyMesh) -> dict[str, LeafPlacement]:
    """Return the placement of every parameter, from shapes and roles by name; axes of size 1 are ignored."""
    return {name: _place(name, shape, roles[name], mesh) for name, shape in shapes.items()}


def _place(name: str, shape: tuple[int, ...], role: Role, mesh: AnyMesh) -> LeafPlacement:
    layered, own = is_stacked(name), nontrivial_axes(mesh, ["expert"] if role == "expert" else [])
    over = nontrivial_axes(mesh, [axis for axis in STORED_OVER if axis not in own])
    experts_over = ()
    if role == "expert":
        experts = shape[EXPERTS_AXIS] // _size(mesh, own)
        fsdp = tuple(axis for axis in over if axis == "fsdp")
        experts_over = next((axes for axes in (over, fsdp) if experts % _size(mesh, axes) == 0), ())
        over = tuple(axis for axis in over if axis not in experts_over)
    dimensions = len(shape) - layered - (role == "expert")
    candidates = sorted(range(-min(2, dimensions), 0), key=lambda axis: shape[axis], reverse=True)
    pairs = ((index, axes) for axes in _subsets(mesh, over) for index in candidates)
    axis, over = next((pair for pair in pairs if shape[pair[0]] % _size(mesh, pair[1]) == 0), (None, ()))
    spec: list[Any] = [None] * len(shape)
    if axis is not None:
        spec[axis] = over
    if own or experts_over:
        spec[EXPERTS_AXIS] = (*own, *experts_over)
    return LeafPlacement(PartitionSpec(*spec), axis, over, own, experts_over, role)


def _subsets(mesh: AnyMesh, axes: tuple[str, ...]) -> list[tuple[str, ...]]:
    """Return the nonempty subsets of mesh axes, those with fsdp first, and then the largest."""
    subsets = [some for count in range(len(axes), 0, -1) for some in itertools.combinations(axes, count)]
    return sorted(subsets, key=lambda some: ("fsdp" in some, _size(mesh, some)), reverse=True)


def _size(mesh: AnyMesh, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


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
