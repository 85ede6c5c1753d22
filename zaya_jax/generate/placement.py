"""The devices that generate: rows of a batch are split over some, the cache of each row over others."""

import dataclasses
import functools
import sys
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from zaya_jax.config import ModelConfig, ParallelConfig
from zaya_jax.config.checks import require
from zaya_jax.model.tree import compute_dtypes, roles
from zaya_jax.model.zaya import Zaya, abstract_model
from zaya_jax.ops.kernel_table import find_table
from zaya_jax.ops.registry import KernelSelection, select_kernels, validate_kernels
from zaya_jax.ops.target import current_target
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.parallel.placement import Placement

FIRST_DEVICE = ParallelConfig(data=1)


def decode_placement(model: Zaya, parallel: ParallelConfig, pinned: Mapping[str, str] | None = None) -> Placement:
    """Make the placement of generation on devices of this process, with kernels validated there, or `pinned` ones.

    Every device has all parameters. The rows of a batch are split over `parallel.data` (None for all devices that
    `context` leaves). The cache of each row is split over `context`, except for layers with a window. InputError if
    there are not as many devices, or another axis is not 1.
    """
    config, dtype, mesh = model.config, model.dtype.name, decode_mesh(parallel)
    dtypes, kernels = compute_dtypes(roles(abstract_model(config)), dtype), generation_kernels(config, dtype, pinned)
    return Placement(dataclasses.replace(parallel, data=mesh.shape["data"]), mesh, {}, dtypes, kernels)


def generation_kernels(config: ModelConfig, dtype: str, pinned: Mapping[str, str] | None = None) -> KernelSelection:
    """Select the fastest kernels for generation on this process' devices, and validate them."""
    say = functools.partial(print, file=sys.stderr)  # texts go to stdout
    selection = select_kernels(current_target(), config, dtype, find_table(current_target(), say), pinned)
    return validate_kernels(selection, config, dtype, training=False)


def decode_mesh(parallel: ParallelConfig, prefix: str = "parallel.") -> Mesh:
    """Make the mesh of `decode_placement`; `prefix` precedes the names of the axes in messages."""
    devices, data, context = jax.local_devices(), parallel.data, parallel.context
    for axis, size in (("data", data), ("context", context)):
        require(size is None or size >= 1, f"{prefix}{axis}", size, "at least 1")
    for axis, size in (("fsdp", parallel.fsdp), ("expert", parallel.expert)):
        require(size == 1, f"{prefix}{axis}", size, "1 to generate, since every device has all parameters")
    available = f"{len(devices)}, the number of devices"
    if data is None:
        require(len(devices) % context == 0, f"{prefix}context", context, f"a divisor of {available}")
        data = len(devices) // context
    count = data * context
    require(count <= len(devices), f"{prefix}data {data} × {prefix}context {context}", count, f"at most {available}")
    return make_mesh(dataclasses.replace(parallel, data=data), devices[:count])
