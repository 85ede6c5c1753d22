"""The device mesh, and how a batch is sharded over it."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from zaya_jax.config import ParallelConfig
from zaya_jax.config.parallel import AXES, BATCH_AXES, axis_sizes

SEQUENCE_AXIS = "context"
# Outermost first: gathering all axes but fsdp gives a layer's fsdp shard.
STORED_OVER = ("fsdp", "data", "context", "expert")  # master weights and optimizer state are split over these

AnyMesh = Mesh | AbstractMesh  # an abstract mesh has no devices, which is enough to trace and to count


def make_mesh(
    config: ParallelConfig | None = None, devices: Sequence[Any] | int | None = None, key: str = "parallel"
) -> Any:
    """Make the mesh of a layout, or without one that of data parallelism only.

    With a number of devices it is an `AbstractMesh`, with which programs can be traced but not compiled; None stands
    for all of this job. `InputError`, with the `key` of the layout, if the product of the axes is not their number.
    """
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes(config or ParallelConfig(), devices if isinstance(devices, int) else len(devices), key)
    types, shape = (AxisType.Auto,) * len(AXES), tuple(sizes.values())
    if isinstance(devices, int):
        return AbstractMesh(shape, AXES, axis_types=types)
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=types)


def batch_spec(leading: int = 0) -> PartitionSpec:
    """Return the partition of an array [sequences, tokens] after `leading` unsharded axes."""
    return PartitionSpec(*[None] * leading, BATCH_AXES, SEQUENCE_AXIS)


def batch_sharding(mesh: AnyMesh, leading: int = 0) -> NamedSharding:
    """Return the sharding of `batch_spec` on `mesh`."""
    return NamedSharding(mesh, batch_spec(leading))


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Return the sharding in which every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_shards(mesh: AnyMesh) -> int:
    """Return the number of shards that the sequences of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def nontrivial_axes(mesh: AnyMesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Return the `axes` with more than one device, since a collective over one device would still copy."""
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)
