"""Helpers of the attention kernels: tiles of rows and keys, masks, loads and stores.

A row is a query and one of the `g` query heads that share a key head; row r is head r % g of query r // g. A tile of
rows thus spans few queries, keys are read once for all heads that share them, and any `g` works. Shapes: `b` batch, `s`
queries, `t` keys, `h` query heads, `k` key heads, `c` channels, `r` rows of a tile, `n` keys of a tile.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.launch import load, store
from pallas_kernels.tiles import Architecture, Tile, tile

# HIDDEN is the score of a hidden key. FLOOR is the initial maximum of a row, above HIDDEN and far below every real
# score; it is also the log-sum-exp of a row that sees no key.
HIDDEN = -1e30
FLOOR = -1e20
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
WIDEST = 128  # channels up to which the listed tile sizes apply; wider heads use smaller tiles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """Queries, and the keys and values that they attend to."""

    q_bshc: jax.Array  # queries, float; the scale 1/√c is applied to them
    k_btkc: jax.Array  # keys, each shared by h / k query heads
    v_btkc: jax.Array  # values
    # int32 document of each query, 0 for padding, which attends to nothing; None, with those of keys, for one document
    # per row
    query_segments_bs: Any = None
    key_segments_bt: Any = None  # int32 document of each key
    # index of the first query among the keys, int32, may be negative; query i sees key j if j <= query_offset + i. For
    # one query a row, it can be an array [b]
    query_offset: Any = 0
    # number of keys that a query sees, its own included; None for all
    window: int | None = dataclasses.field(default=None, metadata={"static": True})

    def call(self, attention: Callable[..., jax.Array]) -> jax.Array:
        """Call `zaya_jax.ops.attention.attention`, or one like it, with the inputs."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[3:]}
        return attention(self.q_bshc, self.k_btkc, self.v_btkc, **options)


class Refs(NamedTuple):
    """References to the arrays of a kernel."""

    q: Any
    k: Any
    v: Any
    do: Any  # gradient of the output; None in the forward pass, like the next two
    lse: Any
    delta: Any
    query_segments: Any  # None without documents
    key_segments: Any

    @classmethod
    def of(cls, x: AttentionInputs, do: Any = None, lse: Any = None, delta: Any = None) -> "Refs":
        """Return the arrays of a launch in the order of the fields."""
        return cls(x.q_bshc, x.k_btkc, x.v_btkc, do, lse, delta, x.query_segments_bs, x.key_segments_bt)


class Static(NamedTuple):
    """Static values of a kernel."""

    rows: int  # size of a tile of rows
    keys: int  # size of a tile of keys
    window: int | None

    @classmethod
    def of(cls, tile: Tile, x: AttentionInputs) -> "Static":
        """Return the values of a launch with this tile."""
        rows, keys = tile.sizes
        return cls(rows, keys, x.window)


Head = tuple[Any, Any]  # row of the batch, key head


class Rows(NamedTuple):
    """A tile of rows in a kernel: arrays [r]."""

    head: Head
    query: Any  # index of the query
    query_head: Any
    inside: Any  # whether the row exists
    position: Any  # index of the query among the keys
    segment: Any  # document of the query; None without documents


def tile_of(kernel: str, architecture: Architecture, q_bshc: jax.Array) -> Tile:
    """Return the tile sizes of `kernel`, smaller for wide heads."""
    entry, c = tile(kernel, architecture, q_bshc.dtype), q_bshc.shape[3]
    return entry._replace(sizes=tuple(max(size * WIDEST // max(c, WIDEST), 16) for size in entry.sizes))


def ranges(x: AttentionInputs, sizes: tuple[int, ...], *, of_keys: bool = False) -> jax.Array:
    """Compute which tiles of keys each tile of rows visits, or with `of_keys` the other way round.

    Tiles at both ends that share no document, or that causality or the window hides, are skipped. The result is correct
    for any layout of documents; if documents are contiguous, only tiles that share a document are visited. `sizes` are
    those of a tile of rows, and of a tile of keys. Returns int32 [b, tiles, 4]: low, start, stop, high. Tiles [low,
    high) are visited; those of [start, stop) are fully visible and need no mask.
    """
    (b, s, h, _), (_, t, num_kv, _) = x.q_bshc.shape, x.k_btkc.shape
    groups, offset, window = h // num_kv, x.query_offset, x.window
    rows, keys = sizes
    row = jnp.arange(pl.cdiv(s * groups, rows), dtype=jnp.int32)[:, None] * rows
    key = jnp.arange(pl.cdiv(t, keys), dtype=jnp.int32)[None, :] * keys
    first = offset + row // groups
    last = offset + jnp.minimum(row + rows - 1, s * groups - 1) // groups
    some = key <= last
    whole = (key + keys - 1 <= first) & (key + keys <= t)
    if window is not None:
        some &= key + keys - 1 > first - window
        whole &= key > last - window
    if x.query_segments_bs is not None and x.key_segments_bt is not None:
        query_low, query_high, query_one = _documents(jnp.repeat(x.query_segments_bs, groups, axis=1), rows)
        key_low, key_high, key_one = _documents(x.key_segments_bt, keys)
        query_low, query_high, query_one = (x[:, :, None] for x in (query_low, query_high, query_one))
        key_low, key_high, key_one = (x[:, None, :] for x in (key_low, key_high, key_one))
        some = some & (query_low <= key_high) & (key_low <= query_high)
        whole = whole & query_one & key_one & (query_low == key_low)
    if of_keys:
        some, whole = jnp.swapaxes(some, -1, -2), jnp.swapaxes(whole, -1, -2)
    count = some.shape[-1]
    index = jnp.arange(count, dtype=jnp.int32)
    high = jnp.where(some, index + 1, 0).max(-1)
    low = jnp.minimum(jnp.where(some, index, count).min(-1), high)
    start = jnp.minimum(jnp.where(whole & some, index, count).min(-1), high)
    stop = jnp.where((index >= start[..., None]) & ~(whole & some), index, count).min(-1)
    bounds = jnp.stack([low, start, jnp.clip(stop, start, high), high], -1)
    return jnp.broadcast_to(bounds, (b, *bounds.shape[-2:]))


def _documents(segments: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the smallest and largest document of each tile, and whether it is a single document without padding."""
    b, length = segments.shape
    tiles = jnp.pad(segments, ((0, 0), (0, -length % size)), mode="edge").reshape(b, -1, size)
    limits = jnp.iinfo(jnp.int32)
    low = jnp.where(tiles == 0, limits.max, tiles).min(-1)
    high = jnp.where(tiles == 0, limits.min, tiles).max(-1)
    return low, high, (low == high) & (tiles != 0).all(-1)


def key_head(x: Refs, axis: int) -> Head:
    """Return the batch row and key head of a program, from its index along an axis of the grid."""
    num_kv = x.k.shape[2]
    return pl.program_id(axis) // num_kv, pl.program_id(axis) % num_kv


def bounds_of(bounds_ref: Any, head: Head, index: Any) -> tuple[Any, ...]:
    """Load the bounds of tile `index` from `ranges`."""
    return tuple(bounds_ref[head[0], index, i] for i in range(4))


def rows_of(x: Refs, head: Head, index: Any, size: int, offset: Any, segmented: bool = True) -> Rows:
    """Return tile `index` of the rows that share a key head; without their documents unless `segmented`."""
    (_, s, h, _), num_kv = x.q.shape, x.k.shape[2]
    groups = h // num_kv
    row = index * size + jnp.arange(size, dtype=jnp.int32)
    query, inside = row // groups, row < s * groups
    query_head = head[1] * groups + row % groups
    segment = None
    if segmented and x.query_segments is not None:
        segment = load(x.query_segments.at[head[0], query], mask=inside)
    return Rows(head, query, query_head, inside, offset + query, segment)


def load_rows(ref: Any, rows: Rows) -> jax.Array:
    """Load [r, c] from an array [b, s, h, c], or [r] from [b, s, h]; 0 for rows that do not exist."""
    at, mask = _at(ref, rows)
    return load(ref.at[at], mask=mask)


def store_rows(ref: Any, rows: Rows, values: jax.Array) -> None:
    """Store [r, c] or [r] where `load_rows` loads it."""
    at, mask = _at(ref, rows)
    store(ref.at[at], values.astype(ref.dtype), mask=mask)


def _at(ref: Any, rows: Rows) -> tuple[Any, Any]:
    if len(ref.shape) == 3:
        return (rows.head[0], rows.query, rows.query_head), rows.inside
    channels = jnp.arange(ref.shape[3], dtype=jnp.int32)[None, :]
    mask = rows.inside[:, None] & (channels >= 0)
    return (rows.head[0], rows.query[:, None], rows.query_head[:, None], channels), mask


def key_tile(ref: Any, head: Head, keys: jax.Array, bounded: bool) -> tuple[Any, Any]:
    """Return the indices of keys [n] in an array [b, t, k, c], and their mask (None without `bounded`)."""
    channels = jnp.arange(ref.shape[3], dtype=jnp.int32)[None, :]
    mask = (keys[:, None] < ref.shape[1]) & (channels >= 0) if bounded else None
    return (head[0], keys[:, None], head[1], channels), mask


def load_keys(ref: Any, head: Head, keys: jax.Array, bounded: bool) -> jax.Array:
    """Load keys [n, c]; with `bounded`, keys that do not exist are 0."""
    at, mask = key_tile(ref, head, keys, bounded)
    return load(ref.at[at], mask=mask)


def key_segments(x: Refs, head: Head, keys: jax.Array) -> jax.Array | None:
    """Load the documents of keys, int32 [n]; 0 for keys that do not exist, None without documents."""
    if x.key_segments is None:
        return None
    return load(x.key_segments.at[head[0], keys], mask=keys < x.key_segments.shape[1])


def seen(
    x: Refs, rows: Rows, keys: jax.Array, segments: jax.Array | None, window: int | None, keys_first: bool = False
) -> jax.Array:
    """Return the mask of keys that each row sees, bool [r, n], or [n, r] with `keys_first`."""
    t = x.k.shape[1]

    def row(x: jax.Array) -> jax.Array:
        return x[None, :] if keys_first else x[:, None]

    def key(x: jax.Array) -> jax.Array:
        return x[:, None] if keys_first else x[None, :]

    # Conditions on a row or a key alone are folded into its index, since comparisons of whole tiles need registers.
    if segments is None:
        last, place = rows.position, jnp.where(keys < t, keys, jnp.iinfo(jnp.int32).max)
    else:
        last, place = jnp.where(rows.segment != 0, rows.position, -1), keys
    # With a window one comparison, too, in which negative differences are large: masks fill AMD's scalar registers.
    mask = key(place) <= row(last) if window is None else (row(last) - key(place)).astype(jnp.uint32) < window
    return mask if segments is None else mask & (key(segments) == row(rows.segment))


def visit(bounds: tuple[Any, ...], body: Any, state: Any) -> Any:
    """Call `body(index, state, masked)` for all tiles of `ranges`: unmasked tiles in one loop, then the others."""
    low, start, stop, high = bounds
    before = start - low

    def masked(i: Any, state: Any) -> Any:
        return body(jnp.where(i < before, low + i, stop - before + i), state, True)

    state = jax.lax.fori_loop(start, stop, lambda i, state: body(i, state, False), state)
    return jax.lax.fori_loop(0, before + high - stop, masked, state)
