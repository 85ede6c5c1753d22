"""Matrices that are split over devices, orthogonalised whole: each device does its part of them (zaya1.md §3.2)."""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp

from zaya_jax.parallel.mesh import AnyMesh
from zaya_jax.parallel.rules import Placement

StackFunction = Callable[[jax.Array], jax.Array]  # [stack, p, q] → the same shape, each matrix on its own


def on_whole_matrices(
    placed: Mapping[str, Placement], mesh: AnyMesh
) -> Callable[[str, jax.Array, StackFunction], jax.Array]:
    """(name, leaf, function of matrices) → the function of the leaf's matrices, placed as the leaf is.

    A device holds some rows (or columns) of every matrix of a leaf. One all-to-all gives it some of the matrices
    whole, and another brings the results back. A stack whose size the devices do not divide is padded with zeros
    on the way, and nowhere else: checkpoints hold the natural shapes. What is not split is done by every device,
    inside the same kind of region, so that a kernel always has local shapes.
    """

    def whole(name: str, m: jax.Array, function: StackFunction) -> jax.Array:
        place = placed[name]
        axis = place.axis
        if math.prod(mesh.shape.values()) == 1:
            return _flat(function, m)

        devices = math.prod(mesh.shape[one] for one in place.over)

        def here(stack: jax.Array) -> jax.Array:
            return function(stack) if axis is None else _exchanged(function, stack, 3 + axis, place.over, devices)

        return jax.shard_map(
            lambda m: _flat(here, m), mesh=mesh, in_specs=place.stored, out_specs=place.stored, check_vma=False
        )(m)

    return whole


def _flat(function: StackFunction, m: jax.Array) -> jax.Array:
    return function(m.reshape(-1, *m.shape[-2:])).reshape(m.shape)


def _exchanged(function: StackFunction, stack: jax.Array, axis: int, over: tuple[str, ...], devices: int) -> jax.Array:
    count = stack.shape[0]
    padded = jnp.pad(stack, ((0, -count % devices), (0, 0), (0, 0)))
    whole = jax.lax.all_to_all(padded, over, split_axis=0, concat_axis=axis, tiled=True)
    parts = jax.lax.all_to_all(function(whole), over, split_axis=axis, concat_axis=0, tiled=True)
    return parts[:count]
