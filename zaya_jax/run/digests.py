"""Digests of bytes, and of the parts that the arrays of a checkpoint were saved in.

A part is named by the slice of the whole array that it is, so that a digest says what must be read back whatever
devices read it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import xxhash

Digests = dict[str, dict[str, str]]  # name of an array → slice → digest


def digest(data: bytes | memoryview) -> str:
    """XXH3-128 of the bytes, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def slice_text(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """A slice of an array of `shape` as text for JSON: '0:2,0:8'; empty for a scalar."""
    bounds = (axis.indices(size) for axis, size in zip(index, shape, strict=True))
    return ",".join(f"{start}:{stop}" for start, stop, _ in bounds)


def read_slice(text: str) -> tuple[slice, ...]:
    """The inverse of `slice_text`; ValueError where it is none."""
    pairs = (part.split(":") for part in text.split(",")) if text else ()
    return tuple(slice(int(start), int(stop)) for start, stop in pairs)


def joined(processes: Iterable[Digests]) -> Digests:
    """The digests of several processes as one."""
    merged: Digests = {}
    for digests in processes:
        for name, parts in digests.items():
            merged.setdefault(name, {}).update(parts)
    return merged


def uncovered(digests: Digests, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """The arrays of `shapes` of which parts have no digest."""

    def elements(where: str) -> int:
        return math.prod(axis.stop - axis.start for axis in read_slice(where))

    return [name for name, shape in shapes.items() if sum(map(elements, digests.get(name, ()))) != math.prod(shape)]


def leaf_digest(parts: Mapping[str, str]) -> str:
    """One digest for an array, of those of its parts and of how it is cut into them."""
    return digest("\n".join(f"{where} {parts[where]}" for where in sorted(parts)).encode())
