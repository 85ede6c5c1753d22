"""The device mesh, and how a batch lies on it."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from zaya_jax.errors import InputError

AXES = ("data", "fsdp", "expert", "context")
BATCH_AXES = ("data", "fsdp", "expert")  # sequences of a batch are split over these


def make_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with all `devices` (those of this job where None) along the data axis."""
    devices = jax.devices() if devices is None else devices
    array = np.asarray(devices).reshape(len(devices), 1, 1, 1)
    return Mesh(array, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def batch_spec(leading: int = 0) -> PartitionSpec:
    """Split of an array whose sequences follow `leading` unsplit axes."""
    return PartitionSpec(*[None] * leading, BATCH_AXES)


def batch_sharding(mesh: Mesh, leading: int = 0) -> NamedSharding:
    """`batch_spec` on `mesh`."""
    return NamedSharding(mesh, batch_spec(leading))


def replicated(mesh: Mesh) -> NamedSharding:
    """Every device holds the whole array."""
    return NamedSharding(mesh, PartitionSpec())


def batch_shards(mesh: Mesh) -> int:
    """Parts that the sequences of a batch are split into."""
    return int(np.prod([mesh.shape[axis] for axis in BATCH_AXES]))


def check_batch(mesh: Mesh, sequences: int, key: str, micro: int = 1) -> None:
    """Raise `InputError` unless `sequences`, given by the configuration's `key`, make whole parts of `micro` each."""
    shards = batch_shards(mesh)
    if sequences % (shards * micro):
        each = "" if micro == 1 else f" times {micro} sequences a device works through at once"
        raise InputError(f"{key} makes {sequences} sequences, but must make a multiple of {shards}, the number of "
                         f"devices they are split over{each}.")  # fmt: skip
