"""Inspect a checkpoint and compare two, reading one part at a time."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zaya_jax.checkpoint.reader import CheckpointReader
from zaya_jax.config import flatten_keys
from zaya_jax.run.digests import read_slice
from zaya_jax.run.manifest import Manifest, read_digests, read_manifest


class Leaf(NamedTuple):
    """Statistics of a saved array: `norm` is Euclidean, `largest` the maximum absolute value."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    norm: float
    largest: float
    finite: bool


class Distance(NamedTuple):
    """Difference of an array between two checkpoints.

    `largest` is the maximum absolute difference, `relative` the norm of the difference over the norm of the first.
    """

    name: str
    largest: float
    relative: float
    note: str = ""


def open_checkpoint(folder: Path) -> tuple[Manifest, CheckpointReader]:
    """Open a checkpoint for reading, without verifying its array data.

    Raises:
      InputError: the manifest or a file's size shows damage.
    """
    manifest = read_manifest(folder)
    return manifest, CheckpointReader(folder, manifest.leaves, manifest.files)


def saved_slices(folder: Path, manifest: Manifest) -> dict[str, list[str]]:
    """Return the slices in which each array was saved; one slice of the whole array if that is unknown."""
    digests = read_digests(folder, manifest)
    whole = {name: ",".join(f"0:{size}" for size in leaf["shape"]) for name, leaf in manifest.leaves.items()}
    return {name: sorted(digests.get(name, {whole[name]: ""})) for name in manifest.leaves}


def inspect_checkpoint(folder: Path) -> Iterator[Leaf]:
    """Yield the statistics of each array, ordered by name."""
    manifest, reader = open_checkpoint(folder)
    for name, slices in sorted(saved_slices(folder, manifest).items()):
        squares, largest, finite = 0.0, 0.0, True
        for where in slices:
            x = _float64(reader.read(name, read_slice(where)))
            squares += float(np.vdot(x, x))
            largest = max(largest, float(np.abs(x).max(initial=0.0)))
            finite = finite and bool(np.isfinite(x).all())
        leaf = manifest.leaves[name]
        yield Leaf(name, leaf["dtype"], tuple(leaf["shape"]), math.sqrt(squares), largest, finite)


def compare_checkpoints(first_folder: Path, second_folder: Path) -> Iterator[Distance]:
    """Yield the arrays that are not bitwise equal in two checkpoints."""
    first, first_reader = open_checkpoint(first_folder)
    second, second_reader = open_checkpoint(second_folder)
    slices = saved_slices(first_folder, first)
    for name in sorted({*first.leaves, *second.leaves}):
        left, right = first.leaves.get(name), second.leaves.get(name)
        if left is None or right is None:
            yield Distance(name, math.nan, math.nan, f"only in the {'second' if left is None else 'first'}")
        elif (left["dtype"], left["shape"]) != (right["dtype"], right["shape"]):
            yield Distance(name, math.nan, math.nan,
                           f"{left['dtype']} {left['shape']} and {right['dtype']} {right['shape']}")  # fmt: skip
        elif left.get("digest") is None or left.get("digest") != right.get("digest"):
            distance = _distance(name, first_reader, second_reader, slices[name])
            if distance is not None:
                yield distance


def configurations(first: Manifest, second: Manifest) -> Iterator[tuple[str, Any, Any]]:
    """Yield the configuration keys that differ, with both values."""
    before, after = (dict(flatten_keys(manifest.metadata.get("config", {}))) for manifest in (first, second))
    for key in [*before, *(key for key in after if key not in before)]:
        if before.get(key) != after.get(key):
            yield key, before.get(key), after.get(key)


def _distance(name: str, first: CheckpointReader, second: CheckpointReader, slices: list[str]) -> Distance | None:
    same, squares, norm, largest = True, 0.0, 0.0, 0.0
    for where in slices:
        a, b = (reader.read(name, read_slice(where)) for reader in (first, second))
        same = same and a.tobytes() == b.tobytes()
        x, y = _float64(a), _float64(b)
        squares, norm = squares + float(np.vdot(x - y, x - y)), norm + float(np.vdot(x, x))
        largest = max(largest, float(np.abs(x - y).max(initial=0.0)))
    relative = math.sqrt(squares / norm) if norm else math.inf if squares else 0.0
    return None if same else Distance(name, largest, relative)


def _float64(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64).reshape(-1)
