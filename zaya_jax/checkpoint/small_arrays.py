"""Small arrays that every process has whole, saved as one: to Orbax each array is the same work, however small."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from zaya_jax.checkpoint.digest import ArrayPart, parts_to_save
from zaya_jax.parallel.multihost import is_primary
from zaya_jax.run.digests import slice_text

SMALL_ARRAYS = "bundle"  # the name, among the arrays of a checkpoint, of all small ones together
_SMALL = 2**14  # bytes of an array, at most


class PackedArrays(NamedTuple):
    """Arrays as they are written."""

    arrays: dict[str, Any]  # by name; the small ones are in `SMALL_ARRAYS` (uint8 [bytes of all of them])
    small: dict[str, np.ndarray]  # the small ones in host memory; none but in process 0, which writes them
    types: dict[str, tuple[np.dtype, tuple[int, ...]]]  # dtype and shape of each array
    offsets: dict[str, int]  # where each small one begins in `SMALL_ARRAYS`, in bytes

    def large_parts(self) -> list[ArrayPart]:
        """What this process has to save of the arrays that are not small; waits for copies from devices."""
        return parts_to_save({name: x for name, x in self.arrays.items() if name != SMALL_ARRAYS})

    def small_parts(self) -> list[ArrayPart]:
        """The same of the small ones, which are in host memory: training need not wait for this."""
        return [ArrayPart(name, slice_text((slice(None),) * x.ndim, x.shape), x) for name, x in self.small.items()]

    def leaves(self) -> dict[str, dict[str, Any]]:
        """What each array is, as the manifest has it; of a small one also where it begins (`at`)."""
        return {
            name: {"dtype": str(dtype), "shape": list(shape)}
            | ({"at": self.offsets[name]} if name in self.offsets else {})
            for name, (dtype, shape) in self.types.items()
        }


def pack_arrays(arrays: Mapping[str, jax.Array]) -> PackedArrays:
    """Put the small arrays that are whole on every device together; waits for their copies from devices."""
    types = {name: (x.dtype, x.shape) for name, x in arrays.items()}
    packed, offsets, end = {}, {}, 0
    for name, x in arrays.items():
        if x.nbytes <= _SMALL and x.is_fully_replicated:
            packed[name], offsets[name], end = x, end, end + x.nbytes
    if not packed:
        return PackedArrays(dict(arrays), {}, types, {})
    content, small = np.zeros(end, np.uint8), {}
    if is_primary():
        if jax.default_backend() != "cpu":  # where asking costs more than reading
            for x in packed.values():
                x.copy_to_host_async()
        small = {name: np.asarray(x) for name, x in packed.items()}
        content = np.frombuffer(b"".join(x.tobytes() for x in small.values()), np.uint8)
    large = {name: x for name, x in arrays.items() if name not in packed}
    return PackedArrays(large | {SMALL_ARRAYS: content}, small, types, offsets)


def unpack_array(content: np.ndarray, leaf: Mapping[str, Any]) -> np.ndarray:
    """The array that the manifest describes as `leaf`, from the content of `SMALL_ARRAYS`.

    Raises:
      ValueError: that ends before it.
    """
    dtype = np.dtype(leaf["dtype"])
    size = dtype.itemsize * int(np.prod(leaf["shape"], dtype=np.int64))
    return content[leaf["at"] : leaf["at"] + size].view(dtype).reshape(leaf["shape"])
