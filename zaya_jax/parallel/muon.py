"""Distributed Muon: each device orthogonalizes some whole matrices of a sharded stack (docs/reference.md §3.2)."""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from zaya_jax.ops.momentum import Local, OfMatrices, OnMatrices, Pair
from zaya_jax.parallel.mesh import AnyMesh
from zaya_jax.parallel.rules import LeafPlacement


def on_whole_matrices(leaves: Mapping[str, LeafPlacement], mesh: AnyMesh) -> OnMatrices:
    """Make a function (name, arrays, numbers, local, function) → (kept, result), both sharded like `arrays`.

    `arrays` belong to the parameter `name`; `numbers` are the same on all devices. Each device applies `local` to its
    shard, some rows or columns of every matrix, which gives `kept` and matrices. One all-to-all turns these into whole
    matrices for `function`, another returns the results. A stack that the devices do not divide is padded with zeros on
    the way only, so that checkpoints have the natural shapes. Unsharded parameters are processed by every device, also
    inside a `shard_map`, so that kernels always see local shapes.
    """

    def apply(name: str, arrays: Pair, numbers: jax.Array, local: Local, function: OfMatrices) -> Pair:
        placement = leaves[name]
        devices = math.prod(mesh.shape[axis] for axis in placement.over)

        def on_device(numbers: jax.Array, *arrays: jax.Array) -> Pair:
            new_momentum, m = local(numbers, *arrays)
            stack = m.reshape(-1, *m.shape[-2:])
            if placement.axis is None:
                result = function(stack)
            else:
                result = _exchanged(function, stack, 3 + placement.axis, placement.over, devices)
            return new_momentum, result.reshape(m.shape)

        if math.prod(mesh.shape.values()) == 1:
            return on_device(numbers, *arrays)
        specs = (placement.stored,) * 2
        in_specs = (PartitionSpec(), *specs)
        mapped = jax.shard_map(on_device, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False)
        return mapped(numbers, *arrays)

    return apply


def _exchanged(function: OfMatrices, stack: jax.Array, axis: int, over: tuple[str, ...], devices: int) -> jax.Array:
    count = stack.shape[0]
    padded = jnp.pad(stack, ((0, -count % devices), (0, 0), (0, 0)))
    matrices = jax.lax.all_to_all(padded, over, split_axis=0, concat_axis=axis, tiled=True)
    parts = jax.lax.all_to_all(function(matrices), over, split_axis=axis, concat_axis=0, tiled=True)
    return parts[:count]
