"""Small arrays that every process has whole, saved as one: to Orbax each array is the same work, however small."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from zaya_jax.checkpoint.digest import Part, parts_to_save, whole_parts
from zaya_jax.parallel.multihost import is_primary

BUNDLE = "bundle"  # its name among the arrays of a checkpoint
_SMALL = 2**14  # bytes of an array, at most


class Bundled(NamedTuple):
    """Arrays as they are written.

    Attributes:
      arrays: by name; the small ones are in `BUNDLE` (uint8 [bytes of all of them]).
      held: the small ones in host memory; none but in process 0, which writes them.
      kinds: dtype and shape of each array.
      begins: where each small one begins in `BUNDLE`, in bytes.
    """

    arrays: dict[str, Any]
    held: dict[str, np.ndarray]
    kinds: dict[str, tuple[np.dtype, tuple[int, ...]]]
    begins: dict[str, int]

    def large_parts(self) -> list[Part]:
        """What this process has to save of the arrays that are not small; waits for copies from devices."""
        return parts_to_save({name: x for name, x in self.arrays.items() if name != BUNDLE})

    def small_parts(self) -> list[Part]:
        """The same of the small ones, which are in host memory: training need not wait for this."""
        return whole_parts(self.held)

    def leaves(self) -> dict[str, dict[str, Any]]:
        """What each array is, as the manifest has it; of a small one also where it begins (`at`)."""
        found: dict[str, dict[str, Any]] = {}
        for name, (dtype, shape) in self.kinds.items():
            found[name] = {"dtype": str(dtype), "shape": list(shape)}
            if name in self.begins:
                found[name]["at"] = self.begins[name]
        return found


def bundle(arrays: Mapping[str, jax.Array]) -> Bundled:
    """Put the small arrays that are whole on every device together; waits for their copies from devices."""
    kinds = {name: (x.dtype, x.shape) for name, x in arrays.items()}
    small, begins, end = {}, {}, 0
    for name, x in arrays.items():
        size = x.size * x.dtype.itemsize
        if size <= _SMALL and x.is_fully_replicated:
            small[name], begins[name] = x, end
            end += size
    if not small:
        return Bundled(dict(arrays), {}, kinds, {})
    content, held = np.zeros(end, np.uint8), {}
    if is_primary():
        if jax.default_backend() != "cpu":  # where asking costs more than reading
            for x in small.values():
                x.copy_to_host_async()
        held = {name: np.asarray(x) for name, x in small.items()}
        content = np.frombuffer(b"".join(x.tobytes() for x in held.values()), np.uint8)
    large = {name: x for name, x in arrays.items() if name not in small}
    return Bundled(large | {BUNDLE: content}, held, kinds, begins)


def unbundle(held: np.ndarray, leaf: Mapping[str, Any]) -> np.ndarray:
    """The array that the manifest describes as `leaf`, from the content of the bundle.

    Raises:
      ValueError: the bundle ends before it.
    """
    dtype = np.dtype(leaf["dtype"])
    size = dtype.itemsize * int(np.prod(leaf["shape"], dtype=np.int64))
    return held[leaf["at"] : leaf["at"] + size].view(dtype).reshape(leaf["shape"])
