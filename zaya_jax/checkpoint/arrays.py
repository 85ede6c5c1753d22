"""The arrays of a training state in the form in which they are saved: flat, by name, small ones packed into one."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.checkpoint.digest import ArrayPart, parts_to_save
from zaya_jax.job.multihost import is_primary
from zaya_jax.run.digests import slice_text


def named(state: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by dotted name, such as 'params.blocks.0.attention.query'.

    Empty arrays are left out; PRNG keys become their data (uint32 [2]). Leaves can be abstract.
    """
    return {name: _plain(leaf) for name, leaf in _leaves(state) if leaf.size}


def like(abstract: Any, arrays: Mapping[str, jax.Array]) -> Any:
    """Build the pytree that `abstract` describes from `arrays`; the inverse of `named`."""
    treedef = jax.tree.structure(abstract)
    return jax.tree.unflatten(treedef, [_restored(leaf, arrays.get(name)) for name, leaf in _leaves(abstract)])


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    paths = jax.tree.leaves_with_path(tree)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in paths]


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _restored(leaf: Any, array: jax.Array | None) -> Any:
    if array is None:
        return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding)
    return jax.random.wrap_key_data(array) if _is_key(leaf) else array


SMALL_ARRAYS = "bundle"  # name of the packed array in a checkpoint
_SMALL = 2**14  # maximum bytes of a small array


class PackedArrays(NamedTuple):
    """Arrays in the form in which they are written."""

    arrays: dict[str, Any]  # by name; small ones are packed into `SMALL_ARRAYS` (uint8 [total bytes])
    small: dict[str, np.ndarray]  # small arrays in host memory, in process 0 only
    leaves: dict[str, dict[str, Any]]  # dtype and shape of each array, and byte offset (`at`) of small ones

    def large_parts(self) -> list[ArrayPart]:
        """List this process's parts of the large arrays; waits for copies from devices."""
        return parts_to_save({name: x for name, x in self.arrays.items() if name != SMALL_ARRAYS})

    def small_parts(self) -> list[ArrayPart]:
        """List the small arrays as parts; they are already in host memory, so training does not wait."""
        return [ArrayPart(name, slice_text((slice(None),) * x.ndim, x.shape), x) for name, x in self.small.items()]


def pack_arrays(arrays: Mapping[str, jax.Array]) -> PackedArrays:
    """Pack the small, fully replicated arrays; waits for their copies from devices."""
    leaves = {name: dict[str, Any]({"dtype": str(x.dtype), "shape": list(x.shape)}) for name, x in arrays.items()}
    packed, end = {}, 0
    for name, x in arrays.items():
        if x.nbytes <= _SMALL and x.is_fully_replicated:
            packed[name], leaves[name]["at"], end = x, end, end + x.nbytes
    if not packed:
        return PackedArrays(dict(arrays), {}, leaves)
    content, small = np.zeros(end, np.uint8), {}
    if is_primary():
        if jax.default_backend() != "cpu":  # on a CPU the request costs more than the copy
            for x in packed.values():
                x.copy_to_host_async()
        small = {name: np.asarray(x) for name, x in packed.items()}
        content = np.frombuffer(b"".join(x.tobytes() for x in small.values()), np.uint8)
    large = {name: x for name, x in arrays.items() if name not in packed}
    return PackedArrays(large | {SMALL_ARRAYS: content}, small, leaves)


def unpack_array(content: np.ndarray, leaf: Mapping[str, Any]) -> np.ndarray:
    """Extract what the manifest describes as `leaf` from the content of `SMALL_ARRAYS`; ValueError if it is short."""
    dtype = np.dtype(leaf["dtype"])
    size = dtype.itemsize * int(np.prod(leaf["shape"], dtype=np.int64))
    return content[leaf["at"] : leaf["at"] + size].view(dtype).reshape(leaf["shape"])
