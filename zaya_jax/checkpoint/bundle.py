"""Small arrays that every process has whole, saved as one: to Orbax each array is the same work, however small."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

BUNDLE = "bundle"  # its name among the arrays of a checkpoint
_SMALL = 2**14  # bytes of an array, at most


class Bundled(NamedTuple):
    """Arrays as they are written.

    Attributes:
      arrays: by name; the small ones are in `BUNDLE` (uint8 [bytes of all of them]).
      at: where each small one begins there, in bytes.
    """

    arrays: dict[str, Any]
    at: dict[str, int]


def bundle(arrays: Mapping[str, jax.Array]) -> Bundled:
    """Put the small arrays that are whole on every device together; waits for their copies from devices."""
    small = {name: x for name, x in arrays.items() if x.is_fully_replicated and x.nbytes <= _SMALL}
    for x in small.values():
        x.copy_to_host_async()
    at, pieces, end = {}, [], 0
    for name, x in small.items():
        at[name] = end
        pieces.append(np.asarray(x).reshape(-1).view(np.uint8))
        end += x.nbytes
    large = {name: x for name, x in arrays.items() if name not in small}
    return Bundled(large | {BUNDLE: np.concatenate(pieces)} if small else large, at)


def unbundle(held: np.ndarray, leaf: Mapping[str, Any]) -> np.ndarray:
    """The array that the manifest describes as `leaf`, from the content of the bundle.

    Raises:
      ValueError: the bundle ends before it.
    """
    dtype = np.dtype(leaf["dtype"])
    size = dtype.itemsize * int(np.prod(leaf["shape"], dtype=np.int64))
    return held[leaf["at"] : leaf["at"] + size].view(dtype).reshape(leaf["shape"])
