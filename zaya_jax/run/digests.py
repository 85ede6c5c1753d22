"""Digests of bytes and of the parts in which a checkpoint's arrays were saved.

A part is identified by its slice of the whole array, so a digest can be checked on any device layout.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import xxhash

Digests = dict[str, dict[str, str]]  # name of an array → slice → digest
new_digest = xxhash.xxh3_128  # of data that comes in pieces


def digest(data: bytes | memoryview) -> str:
    """Return the XXH3-128 digest as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def slice_text(index: tuple[slice, ...], shape: tuple[int, ...]) -> str:
    """Format a slice of an array of `shape` for JSON, such as '0:2,0:8'; empty for a scalar."""
    bounds = (axis.indices(size) for axis, size in zip(index, shape, strict=True))
    return ",".join(f"{start}:{stop}" for start, stop, _ in bounds)


def read_slice(text: str) -> tuple[slice, ...]:
    """Invert `slice_text`; ValueError if the text is not a slice."""
    pairs = (part.split(":") for part in text.split(",")) if text else ()
    return tuple(slice(int(start), int(stop)) for start, stop in pairs)


def joined(processes: Iterable[Digests]) -> Digests:
    """Merge the digests of several processes."""
    merged: Digests = {}
    for digests in processes:
        for name, parts in digests.items():
            merged.setdefault(name, {}).update(parts)
    return merged


def uncovered(digests: Digests, shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """List the arrays of `shapes` that digests do not cover completely."""

    def elements(span: str) -> int:
        return math.prod(axis.stop - axis.start for axis in read_slice(span))

    return [name for name, shape in shapes.items() if sum(map(elements, digests.get(name, ()))) != math.prod(shape)]


def leaf_digest(parts: Mapping[str, str]) -> str:
    """Combine the digests of an array's parts into one, which also depends on how the array is cut."""
    return digest("\n".join(f"{span} {parts[span]}" for span in sorted(parts)).encode())
