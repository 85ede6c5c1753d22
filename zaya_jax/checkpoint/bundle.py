"""Small arrays that every process has whole, saved as one: to Orbax each array is the same work, however small."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from zaya_jax.checkpoint.digest import Part, parts_to_save, whole_parts
from zaya_jax.parallel.processes import is_first

BUNDLE = "bundle"  # its name among the arrays of a checkpoint
_SMALL = 2**14  # bytes of an array, at most


class Bundled(NamedTuple):
    """Arrays as they are written.

    Attributes:
      arrays: by name; the small ones are in `BUNDLE` (uint8 [bytes of all of them]).
      held: the small ones in host memory; none but in process 0, which writes them.
      leaves: what each array is, as the manifest has it; of a small one also where it begins (`at`, bytes).
    """

    arrays: dict[str, Any]
    held: dict[str, np.ndarray]
    leaves: dict[str, dict[str, Any]]

    def parts(self) -> list[Part]:
        """What this process has to save of all arrays."""
        large = parts_to_save({name: x for name, x in self.arrays.items() if name != BUNDLE})
        return large + whole_parts(self.held)


def bundle(arrays: Mapping[str, jax.Array]) -> Bundled:
    """Put the small arrays that are whole on every device together; waits for their copies from devices."""
    small = {name: x for name, x in arrays.items() if x.nbytes <= _SMALL and x.is_fully_replicated}
    leaves = {name: {"dtype": str(x.dtype), "shape": list(x.shape)} for name, x in arrays.items()}
    if not small:
        return Bundled(dict(arrays), {}, leaves)
    end = 0
    for name, x in small.items():
        leaves[name]["at"] = end
        end += x.nbytes
    content, held = np.zeros(end, np.uint8), {}
    if is_first():
        for x in small.values():
            x.copy_to_host_async()
        held = {name: np.asarray(x) for name, x in small.items()}
        for name, x in held.items():
            at = leaves[name]["at"]
            content[at : at + x.nbytes] = x.reshape(-1).view(np.uint8)
    return Bundled({name: x for name, x in arrays.items() if name not in small} | {BUNDLE: content}, held, leaves)


def unbundle(held: np.ndarray, leaf: Mapping[str, Any]) -> np.ndarray:
    """The array that the manifest describes as `leaf`, from the content of the bundle.

    Raises:
      ValueError: the bundle ends before it.
    """
    dtype = np.dtype(leaf["dtype"])
    size = dtype.itemsize * int(np.prod(leaf["shape"], dtype=np.int64))
    return held[leaf["at"] : leaf["at"] + size].view(dtype).reshape(leaf["shape"])
