"""A table for people: the storage of each parameter in a layout, and when its devices gather it."""

import math
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from zaya_jax.model.tree import is_stacked, name_in_layer
from zaya_jax.parallel.mesh import AXES, nontrivial_axes
from zaya_jax.parallel.placement import Placement
from zaya_jax.run.table import format_table, size_text


class StoredRow(NamedTuple):
    """Parameters that are stored and gathered alike."""

    stored_over: tuple[str, ...]  # mesh axes that they and their optimizer state are split over
    # The other mesh axes with more than one device; each of their devices stores the same.
    replicated_over: tuple[str, ...]
    gathered: str  # over which axes they are gathered when; experts stay split over `expert`
    bytes: int  # of them and their optimizer state on one device
    # The part of each in `bytes`, the largest first; layers' parameters by their name in the layer.
    parameters: dict[str, int]


def storage_rows(placement: Placement, state: Any) -> list[StoredRow]:
    """Return the table, the largest first, for a state with frozen parameters, abstract or not; empty on one device."""
    axes = nontrivial_axes(placement.mesh, AXES)
    alike = defaultdict[tuple[tuple[str, ...], str], dict[str, int]](dict)
    for path, x in jax.tree_util.tree_leaves_with_path(placement.abstract(state) if axes else []):
        names = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        if name := next((name for name in names if name in placement.leaves), None):
            leaf, short = placement.leaves[name], name_in_layer(name) if is_stacked(name) else name
            layer, once = ["fsdp each layer"] if leaf.by_layer else [], leaf.gathered
            gathered = "; ".join([*layer, *([f"{', '.join(once)} each step"] if once else [])]) or "never"
            sizes = alike[tuple(axis for axis in axes if axis in leaf.split), gathered]
            sizes[short] = sizes.get(short, 0) + math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    rows = []
    for (split, gathered), sizes in alike.items():
        others, ordered = tuple(axis for axis in axes if axis not in split), sorted(sizes.items(), key=lambda x: -x[1])
        rows.append(StoredRow(split, others, gathered, sum(sizes.values()), dict(ordered)))
    return sorted(rows, key=lambda row: -row.bytes)


def storage_table(rows: Sequence[StoredRow], sizes: Mapping[str, int]) -> list[str]:
    """Return the lines of a table of `storage_rows`, with the size of each axis; [] if there are none."""

    def named(axes: tuple[str, ...], others: tuple[str, ...]) -> str:
        each = " × ".join(f"{axis} {sizes[axis]}" for axis in axes) or "none"
        return each if others else f"all {math.prod(sizes.values())} devices"

    if not rows:
        return []
    cells = [("stored over", "replicated over", "per device", "gathered")]
    for split, others, gathered, size, _ in rows:
        cells.append((named(split, others), named(others, split), size_text(size), gathered))
    names = [textwrap.indent(textwrap.fill(", ".join(row.parameters), 100), "    ").splitlines() for row in rows]
    return [line for head, rest in zip(format_table(cells), [[], *names], strict=True) for line in (head, *rest)]
