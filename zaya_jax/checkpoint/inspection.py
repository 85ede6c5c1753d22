"""What is in a checkpoint, and how two differ, read part by part."""

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
    """Of an array of a checkpoint: `norm` is the Euclidean one, `largest` the largest absolute value."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    norm: float
    largest: float
    finite: bool


class Distance(NamedTuple):
    """Between an array of two checkpoints: `largest` absolute difference, `relative` that of norms to the first's."""

    name: str
    largest: float
    relative: float
    note: str = ""


def open_checkpoint(folder: Path) -> tuple[Manifest, CheckpointReader]:
    """A checkpoint to read from; its values are not compared with its digests.

    Raises:
      InputError: it is damaged, as far as that is known without reading its values.
    """
    manifest = read_manifest(folder)
    return manifest, CheckpointReader(folder, manifest.leaves)


def saved_slices(folder: Path, manifest: Manifest) -> dict[str, list[str]]:
    """The slices each array was saved in; the whole of it where that is not known."""
    digests = read_digests(folder, manifest)
    whole = {name: ",".join(f"0:{size}" for size in leaf["shape"]) for name, leaf in manifest.leaves.items()}
    return {name: sorted(digests.get(name, {whole[name]: ""})) for name in manifest.leaves}


def inspect_checkpoint(folder: Path) -> Iterator[Leaf]:
    """Its arrays in order of name."""
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
    """What differs between two checkpoints, array by array; nothing where all arrays are bitwise equal."""
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
    """The keys of the configurations that differ, with both values."""
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
