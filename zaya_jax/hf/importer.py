"""Load parameters from a `transformers` folder directly into device shards.

The host holds one layer of one parameter at a time: it maps the tensors from the file, copies them to the devices in
the stored dtype, and casts and places them there. Every process maps the same files and reads only what its devices
need.
"""

import functools
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

    `views` are one array or, of experts in separate tensors, one each. Each device gets only its own part.
    """
    stack, sharding = leaf.ndim - views[0].ndim, leaf.sharding
    if isinstance(sharding, NamedSharding):
        sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[stack:]))

    def read(index: Any) -> np.ndarray:
        if len(views) == 1:
            return np.ascontiguousarray(views[0][index])
        return np.concatenate([view[:, *index[1:]] for view in views[index[0]]])

    layer = jax.make_array_from_callback(leaf.shape[stack:], sharding, read)
    leaf, finite = _writer(leaf.sharding)(leaf, layer, np.int32(group or 0))
    return leaf, bool(finite)  # waits, or the host would run ahead and hold many layers


@functools.lru_cache(maxsize=64)
def _writer(sharding: Sharding) -> Callable[..., jax.Array]:
    """Return a jitted function that writes a layer into its place; that is an argument, to compile only once.

    It also checks for finite values, on devices and after the cast, so that all processes get the same answer.
    """

    def write(leaf: jax.Array, layer: jax.Array, group: jax.Array) -> tuple[jax.Array, jax.Array]:
        layer = layer.astype(leaf.dtype).reshape((1,) * (leaf.ndim - layer.ndim) + layer.shape)
        return jax.lax.dynamic_update_slice_in_dim(leaf, layer, group, 0), jnp.isfinite(layer).all()

    replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
    return jax.jit(write, donate_argnums=0, out_shardings=(sharding, replicated))
