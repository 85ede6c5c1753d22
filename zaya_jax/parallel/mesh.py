"""The device mesh, and how a batch lies on it."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from zaya_jax.config import ParallelConfig
from zaya_jax.errors import InputError

AXES = ("data", "fsdp", "expert", "context")  # each a field of `ParallelConfig`
BATCH_AXES = ("data", "fsdp", "expert")  # sequences of a batch are split over these
SEQUENCE_AXIS = "context"
# Outermost first: a layer's part along fsdp is what gathering the axes after it gives.
STORED_OVER = ("fsdp", "data", "context", "expert")  # master weights and optimizer state are split over these

AnyMesh = Mesh | AbstractMesh  # of devices, or of their number alone: enough to trace and to count


def axis_sizes(config: ParallelConfig, devices: int, where: str = "parallel") -> dict[str, int]:
    """Devices along each axis; `InputError` unless they make up `devices`."""
    sizes = {axis: getattr(config, axis) for axis in AXES if axis != "data"}
    fixed = math.prod(sizes.values())
    data = devices // fixed if config.data is None else config.data
    if data * fixed != devices:
        axes = " × ".join(f"{where}.{axis} {size}" for axis, size in sizes.items())
        if config.data is None:
            raise InputError(f"{axes} is {fixed}, but must divide {devices}, the number of devices in this job.")
        raise InputError(f"{where}.data {data} × {axes} is {data * fixed}, but must be {devices}, the number of "
                         f"devices in this job. Change one, or set {where}.data=null to compute it.")  # fmt: skip
    return {"data": data, **sizes}


def make_mesh(
    config: ParallelConfig | None = None, devices: Sequence[Any] | int | None = None, where: str = "parallel"
) -> Any:
    """The mesh of `config`, or all along data, over `devices` (those of this job where None).

    Over a number of devices it is an `AbstractMesh`: enough to place and to trace, not to compile.
    """
    devices = jax.devices() if devices is None else devices
    sizes = axis_sizes(config or ParallelConfig(), devices if isinstance(devices, int) else len(devices), where)
    types, shape = (AxisType.Auto,) * len(AXES), tuple(sizes.values())
    if isinstance(devices, int):
        return AbstractMesh(shape, AXES, axis_types=types)
    return Mesh(np.asarray(devices).reshape(shape), AXES, axis_types=types)


def batch_spec(leading: int = 0) -> PartitionSpec:
    """Split of an array [sequences, tokens] that follows `leading` unsplit axes."""
    return PartitionSpec(*[None] * leading, BATCH_AXES, SEQUENCE_AXIS)


def batch_sharding(mesh: AnyMesh, leading: int = 0) -> NamedSharding:
    """`batch_spec` on `mesh`."""
    return NamedSharding(mesh, batch_spec(leading))


def replicated(mesh: AnyMesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_shards(mesh: AnyMesh) -> int:
    """Parts that the sequences of a batch are split into."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def nontrivial_axes(mesh: AnyMesh, axes: Sequence[str]) -> tuple[str, ...]:
    """Those of `axes` with more than one device: a collective over one would still copy."""
    return tuple(axis for axis in axes if mesh.shape[axis] > 1)


def check_batch(mesh: AnyMesh, sequences: int, key: str, micro: int = 1) -> None:
    """Raise `InputError` unless `sequences`, given by the configuration's `key`, make whole parts of `micro` each."""
    shards = batch_shards(mesh)
    if sequences % (shards * micro):
        each = "" if micro == 1 else f" × micro_batch {micro}"
        raise InputError(f"{key} gives {sequences} sequences, but must give a multiple of {shards * micro} "
                         f"({shards} data-parallel shards{each}).")  # fmt: skip
