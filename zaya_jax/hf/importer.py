"""Load parameters from a `transformers` folder directly into device shards.

The host holds one piece of one tensor at a time: it maps the piece from the file, copies it to the devices in the
stored dtype, and casts and places it there. Every process maps the same files and reads only what its devices need.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from zaya_jax.errors import InputError
from zaya_jax.hf.finite import not_finite
from zaya_jax.hf.folder import Folder
from zaya_jax.hf.safetensors import Stored
from zaya_jax.hf.tensors import Tensor
from zaya_jax.model.router import is_inert
from zaya_jax.model.tree import abstract_weights
from zaya_jax.parallel.multihost import is_primary
from zaya_jax.run.progress import WorkProgress

PIECE = 2**28  # maximum bytes of a tensor in host memory at once


def read_parameters(folder: Folder, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Load the parameters and balancing biases of a folder.

    Args:
      folder: from `open_folder`.
      abstract: name (`model.tree`) → shape, dtype and sharding of each array to load.

    Returns:
      The arrays of `abstract`. The first layer's router state scale, which folders do not store, is one.

    Raises:
      InputError: `abstract` does not match the folder's architecture (nothing is allocated), or a tensor is not finite
        as stored or in the dtype of `abstract`.
    """
    for name, x in abstract.items():
        there = abstract_weights(folder.config).get(name)
        if there is None or there.shape != x.shape:
            raise InputError(f"{folder.path} has a different architecture: it has no parameter {name} of shape "
                             f"{list(x.shape)}.")  # fmt: skip
    made = _allocate(abstract)
    tensors = [(tensor, folder.stored[tensor.name]) for tensor in folder.tensors if tensor.leaf in abstract]
    with WorkProgress(f"loading {folder.path.name}", sum(x.bytes for _, x in tensors), show=is_primary()) as progress:
        for tensor, stored in tensors:
            made[tensor.leaf], finite = _placed(made[tensor.leaf], tensor, stored)
            if not finite:
                raise not_finite(f"The tensor {tensor.name} in {folder.path}", stored.open(), made[tensor.leaf].dtype,
                                 "the model would compute NaN")  # fmt: skip
            progress.add(stored.bytes)
    return made


def _allocate(abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    def start() -> dict[str, jax.Array]:
        return {name: jnp.full(x.shape, float(is_inert(name, 0)), x.dtype) for name, x in abstract.items()}

    return jax.jit(start, out_shardings={name: x.sharding for name, x in abstract.items()})()


def _placed(leaf: jax.Array, tensor: Tensor, stored: Stored) -> tuple[jax.Array, bool]:
    """Write a tensor into its place in `leaf`, which is donated; also return whether it is finite."""
    whole = tensor.to_ours(stored.open())  # a view; nothing is read yet
    if whole.dtype == np.float64 and not jax.config.read("jax_enable_x64"):
        with np.errstate(over="ignore"):  # overflow is detected below
            whole = whole.astype(np.float32)
    finite = True
    stack = leaf.ndim - whole.ndim
    starts = {} if tensor.group is None else {0: tensor.group}
    if tensor.part is not None:
        starts[stack] = tensor.part.start
    spec = _spec(leaf, stack)
    axis, step = _cut(whole, spec)
    for at in range(0, max(whole.shape[axis], 1), step):
        piece = whole[(slice(None),) * axis + (slice(at, at + step),)]
        here = dict(starts)
        if piece.shape != whole.shape:
            here[stack + axis] = starts.get(stack + axis, 0) + at
        placed = jax.make_array_from_callback(
            piece.shape, _piece_sharding(leaf, piece, spec, stack), lambda i, x=piece: np.ascontiguousarray(x[i])
        )
        leaf, good = _writer(leaf.sharding)(leaf, placed, {axis: np.int32(start) for axis, start in here.items()})
        finite = finite and bool(good)  # wait, or the host would run ahead and hold many pieces
    return leaf, finite


def _spec(leaf: jax.Array, stack: int) -> tuple[Any, ...]:
    """Return the partition spec of the axes after the stack; unsharded if the sharding is not a `NamedSharding`."""
    if not isinstance(leaf.sharding, NamedSharding):
        return (None,) * (leaf.ndim - stack)
    spec = (*leaf.sharding.spec, *[None] * leaf.ndim)
    return spec[stack : leaf.ndim]


def _cut(whole: np.ndarray, spec: tuple[Any, ...]) -> tuple[int, int]:
    """Choose an axis that is not sharded for cutting a tensor into pieces, and the length of a piece."""
    free = [axis for axis, over in enumerate(spec) if over is None] or [0]
    axis = max(free, key=lambda axis: whole.strides[axis] if whole.shape[axis] > 1 else 0)
    count = max(1, math.ceil(whole.nbytes / PIECE))
    return axis, max(1, math.ceil(whole.shape[axis] / count))


def _piece_sharding(leaf: jax.Array, piece: np.ndarray, spec: tuple[Any, ...], stack: int) -> jax.sharding.Sharding:
    """Shard a piece like its parameter, except along the axes that are cut."""
    if not isinstance(leaf.sharding, NamedSharding):
        return leaf.sharding
    kept = [over if size == full else None for over, size, full in zip(spec, piece.shape, leaf.shape[stack:],
                                                                       strict=True)]  # fmt: skip
    return NamedSharding(leaf.sharding.mesh, PartitionSpec(*kept))


@functools.lru_cache(maxsize=64)
def _writer(sharding: jax.sharding.Sharding) -> Callable[..., jax.Array]:
    """Return a jitted function that writes a piece into its place; start indices are arguments, to compile only once.

    It also checks for finite values, on devices and after the cast, so that all processes get the same answer.
    """

    def write(leaf: jax.Array, piece: jax.Array, starts: dict[int, jax.Array]) -> tuple[jax.Array, jax.Array]:
        piece = piece.astype(leaf.dtype).reshape((1,) * (leaf.ndim - piece.ndim) + piece.shape)
        at = [starts.get(axis, np.int32(0)) for axis in range(leaf.ndim)]
        return jax.lax.dynamic_update_slice(leaf, piece, at), jnp.isfinite(piece).all()

    whole = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
    return jax.jit(write, donate_argnums=0, out_shardings=(sharding, whole))
