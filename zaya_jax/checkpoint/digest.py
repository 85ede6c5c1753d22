"""Digests of arrays, one per part that a device holds.

They are computed from host memory: the digest of a file would not detect that wrong data was written.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from zaya_jax.run.digests import Digests, digest, read_slice, slice_text

PIECE = 2**28  # maximum bytes of an array that are read, written and digested at once
_THREADS = 8


class ArrayPart(NamedTuple):
    """A slice of an array in host memory: the shard of one device, or a piece of it."""

    name: str
    span: str  # its slice of the whole array, see `slice_text`
    data: np.ndarray


def array_digest(array: np.ndarray) -> str:
    """Return the digest of an array's bytes in C order."""
    return digest(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def parts_to_save(arrays: Mapping[str, jax.Array]) -> list[ArrayPart]:
    """List the parts that this process must save, so that all processes together save each part once.

    Waits for the copies from the devices.
    """
    shards = [
        (name, slice_text(shard.index, array.shape), shard.data)
        for name, array in arrays.items()
        for shard in array.addressable_shards
        if shard.replica_id == 0
    ]
    for _, _, data in shards:
        data.copy_to_host_async()
    return [piece for name, span, data in shards for piece in pieces(ArrayPart(name, span, np.asarray(data)))]


def pieces(part: ArrayPart) -> Iterator[ArrayPart]:
    """Cut a part along its leading axis into pieces of at most `PIECE` bytes, or of one index if that is larger."""
    count = -(-part.data.nbytes // PIECE)
    if count <= 1:
        yield part
        return
    first, *rest = read_slice(part.span)
    step = max(1, len(part.data) // count)
    for at in range(0, len(part.data), step):
        data = part.data[at : at + step]
        index = (slice(first.start + at, first.start + at + len(data)), *rest)
        yield ArrayPart(part.name, ",".join(f"{axis.start}:{axis.stop}" for axis in index), data)


def digests(parts: Iterable[ArrayPart]) -> Digests:
    """Compute the digest of each part, several in parallel."""
    parts, by_name = list(parts), {}
    with ThreadPoolExecutor(_THREADS, "digest") as pool:
        for part, text in zip(parts, pool.map(lambda part: array_digest(part.data), parts), strict=True):
            by_name.setdefault(part.name, {})[part.span] = text
    return by_name


def differing(arrays: Mapping[str, jax.Array], expected: Digests) -> tuple[list[str], dict[str, list[str]]]:
    """Compare this process's shards of `arrays` with the saved digests.

    Return the names of arrays that differ, and array name → saved slices that no local device holds completely.
    """
    jobs: list[tuple[str, str, np.ndarray]] = []
    not_held: dict[str, list[str]] = {}
    for name, parts in expected.items():
        array = arrays[name]
        shards = {_bounds(shard.index, array.shape): shard.data for shard in array.addressable_shards}
        held = {bounds: np.asarray(data) for bounds, data in shards.items()}
        for span in parts:
            saved = _bounds(read_slice(span), array.shape)
            for bounds, data in held.items():
                axes = list(zip(saved, bounds, strict=True))
                if all(c <= a and b <= d for (a, b), (c, d) in axes):
                    jobs.append((name, span, data[tuple(slice(a - c, b - c) for (a, b), (c, _) in axes)]))
                    break
            else:
                not_held.setdefault(name, []).append(span)
    with ThreadPoolExecutor(_THREADS, "digest") as pool:
        same = pool.map(lambda job: array_digest(job[2]) == expected[job[0]][job[1]], jobs)
        wrong = dict.fromkeys(job[0] for job, good in zip(jobs, same, strict=True) if not good)
    return list(wrong), not_held


def _bounds(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    return tuple(axis.indices(size)[:2] for axis, size in zip(index, shape, strict=True))


def assemble(leaf: Any, read: Callable[[str], np.ndarray]) -> jax.Array:
    """Build the array that the abstract `leaf` describes; `read` is called once per distinct slice."""
    parts = functools.cache(read)
    return jax.make_array_from_callback(
        leaf.shape, leaf.sharding, lambda index: parts(slice_text(index or (), leaf.shape))
    )
