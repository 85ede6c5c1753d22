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
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from zaya_jax.errors import InputError
from zaya_jax.hf.finite import finite_cast
from zaya_jax.hf.folder import Folder
from zaya_jax.hf.safetensors import TensorFile
from zaya_jax.job.multihost import is_primary
from zaya_jax.model.hf_names import HfTensor
from zaya_jax.model.router import is_inert
from zaya_jax.model.tree import abstract_weights
from zaya_jax.run.progress import WorkProgress

PIECE = 2**28  # maximum bytes of a tensor in host memory at once


def read_parameters(folder: Folder, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Load the parameters and balancing biases of a folder with the shapes, dtypes and shardings of `abstract`.

    The first layer's router state scale, which folders do not store, is one. `InputError` if `abstract` does not match
    the folder's architecture (nothing is allocated), or a tensor is not finite as stored or in the dtype of `abstract`.
    """
    known = abstract_weights(folder.config)
    for name, x in abstract.items():
        if name not in known or known[name].shape != x.shape:
            problem = f"it has no parameter {name} of shape {list(x.shape)}"
            raise InputError(f"{folder.path} has a different architecture: {problem}.")
    made = _allocate(abstract)
    parts = {key: tensors for key, tensors in folder.tensors.items() if key[0] in abstract}
    sizes = {key: sum(folder.stored[tensor.name].bytes for tensor in tensors) for key, tensors in parts.items()}
    with WorkProgress(f"loading {folder.path.name}", sum(sizes.values()), show=is_primary()) as progress:
        for (leaf, group), tensors in parts.items():
            views = [_open(tensor, folder.stored[tensor.name]) for tensor in tensors]
            made[leaf], finite = _placed(made[leaf], group, views)
            if not finite:
                for tensor in tensors:
                    name, stored = f"{tensor.name} in {folder.path}", folder.stored[tensor.name].open()
                    finite_cast(stored, made[leaf].dtype, name, "the model would compute NaN")
                raise InputError(f"The parameter {leaf} in {folder.path} is not finite on the device.")
            progress.add(sizes[leaf, group])
    return made


def _allocate(abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    def start() -> dict[str, jax.Array]:
        return {name: jnp.full(x.shape, float(is_inert(name, 0)), x.dtype) for name, x in abstract.items()}

    return jax.jit(start, out_shardings={name: x.sharding for name, x in abstract.items()})()


def _open(tensor: HfTensor, stored: TensorFile) -> np.ndarray:
    """Map a tensor in our layout; nothing is read yet, unless it is of float64."""
    view = tensor.to_ours(stored.open())
    if view.dtype == np.float64 and not jax.config.read("jax_enable_x64"):
        with np.errstate(over="ignore"):  # overflow is detected on the devices
            view = view.astype(np.float32)
    return view


def _placed(leaf: jax.Array, group: int | None, views: list[np.ndarray]) -> tuple[jax.Array, bool]:
    """Write a layer's parameter into its place in `leaf`, which is donated; also return whether it is finite.

    `views` are concatenated along their first axis. Each device gets only its own part.
    """
    stack, finite = leaf.ndim - views[0].ndim, True
    shape, spec = leaf.shape[stack:], _spec(leaf, stack)
    starts = {} if group is None else {0: np.int32(group)}
    axis, step = _cut(views, shape, spec)
    for at in range(0, max(shape[axis], 1), step):
        cut = range(at, min(at + step, shape[axis]))
        if len(cut) != shape[axis]:
            starts[stack + axis] = np.int32(at)
        piece = (*shape[:axis], len(cut), *shape[axis + 1 :])
        sharding = _piece_sharding(leaf, piece, spec, stack)
        placed = jax.make_array_from_callback(piece, sharding, functools.partial(_read, views, axis, cut))
        leaf, good = _writer(leaf.sharding)(leaf, placed, starts)
        finite = finite and bool(good)  # wait, or the host would run ahead and hold many pieces
    return leaf, finite


def _read(views: list[np.ndarray], axis: int, cut: range, index: Any) -> np.ndarray:
    """Read what is at `index`, a tuple of slices, in the range `cut` of `axis` of the concatenation of `views`."""
    own = cut[index[axis]]
    index = (*index[:axis], slice(own.start, own.stop), *index[axis + 1 :])
    first, last, _ = index[0].indices(sum(map(len, views)))
    parts, begin = [], 0
    for view in views:
        parts.append(view[(slice(max(first - begin, 0), max(last - begin, 0)), *index[1:])])
        begin += len(view)
    return np.concatenate(parts) if len(parts) > 1 else np.ascontiguousarray(parts[0])


def _spec(leaf: jax.Array, stack: int) -> tuple[Any, ...]:
    """Return the partition spec of the axes after the stack; unsharded if the sharding is not a `NamedSharding`."""
    if not isinstance(leaf.sharding, NamedSharding):
        return (None,) * (leaf.ndim - stack)
    spec = (*leaf.sharding.spec, *[None] * leaf.ndim)
    return spec[stack : leaf.ndim]


def _cut(views: list[np.ndarray], shape: tuple[int, ...], spec: tuple[Any, ...]) -> tuple[int, int]:
    """Choose an axis that is not sharded for cutting a parameter into pieces, and the length of a piece."""
    free = [axis for axis, over in enumerate(spec) if over is None] or [0]
    strides = views[0].strides if len(views) == 1 else (views[0].nbytes, *views[0].strides[1:])
    axis = max(free, key=lambda axis: strides[axis] if shape[axis] > 1 else 0)
    count = max(1, math.ceil(sum(view.nbytes for view in views) / PIECE))
    return axis, max(1, math.ceil(shape[axis] / count))


def _piece_sharding(leaf: jax.Array, piece: tuple[int, ...], spec: tuple[Any, ...], stack: int) -> Sharding:
    """Shard a piece like its parameter, except along the axes that are cut."""
    if not isinstance(leaf.sharding, NamedSharding):
        return leaf.sharding
    kept = [over if size == full else None for over, size, full in zip(spec, piece, leaf.shape[stack:], strict=True)]
    return NamedSharding(leaf.sharding.mesh, PartitionSpec(*kept))


@functools.lru_cache(maxsize=64)
def _writer(sharding: Sharding) -> Callable[..., jax.Array]:
    """Return a jitted function that writes a piece into its place; start indices are arguments, to compile only once.

    It also checks for finite values, on devices and after the cast, so that all processes get the same answer.
    """

    def write(leaf: jax.Array, piece: jax.Array, starts: dict[int, jax.Array]) -> tuple[jax.Array, jax.Array]:
        piece = piece.astype(leaf.dtype).reshape((1,) * (leaf.ndim - piece.ndim) + piece.shape)
        at = [starts.get(axis, np.int32(0)) for axis in range(leaf.ndim)]
        return jax.lax.dynamic_update_slice(leaf, piece, at), jnp.isfinite(piece).all()

    replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
    return jax.jit(write, donate_argnums=0, out_shardings=(sharding, replicated))
