"""Grouped matmul: sorted rows times the matrix of their group, and the gradient of the matrices.

Rows are sorted by group; rows past the sum of the sizes belong to no group. A program processes one tile of one group.
Its rows are computed before the launch, since grids are static: there are as many programs as any group sizes can need,
and superfluous ones stop at once.

If rows are not sorted in memory, `order` has their places, and tiles gather or scatter them. This costs nothing, since
a row is wider than one memory transaction.

Matrices may be those of one of several layers: kernels take the whole stack and the layer's index, and add gradients to
the layer's part of their sum in place, since a copy of a layer's matrices costs as much as reading them does.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.launch import Out, launch, load, store
from pallas_kernels.product import product
from pallas_kernels.tiles import Architecture, Tile, platform, tile

TOGETHER = 8  # tiles of rows that run concurrently, so that a matrix is read from memory once for all of them
CHIPLETS = 8  # of an MI300X or MI355X, each with its own cache; program i runs on chiplet i mod 8


Static = tuple[tuple[int, ...], Architecture]  # sizes of the tile, for static arguments of kernels


Layer = tuple[jax.Array, jax.Array | int]  # matrices of all layers [l, e, p, q], and the index of one, int32
Moved = tuple[jax.Array | None, jax.Array | None]


class Classes(NamedTuple):
    """The groups of a few rows that are not sorted, whose matrices are in a stack of one layer."""

    class_t: jax.Array  # int32; as many as there are groups or more for no group


class RowTile(NamedTuple):
    """The rows of a program, and their group."""

    rows: jax.Array  # int32 [m], indices among the sorted rows
    inside: jax.Array  # bool [m], whether the row belongs to the group
    matrix: tuple[jax.Array, jax.Array]  # indices of the layer and of the group's matrix
    meets: jax.Array  # int32, 1 if there is a matrix to multiply by, 0 for rows of no group

    def layer(self, ref: Any) -> tuple[jax.Array, ...]:
        """Return the index of the layer in rows of all layers [l, t, q]; none for those of one layer, [t, q]."""
        return self.matrix[: len(ref.shape) - 2]


def row_tiles(sizes_e: jax.Array, rows: int, block: int, layer: jax.Array | int = 0) -> jax.Array:
    """Split the rows into tiles of `block` rows, each within one group; tiles of rows of no group come last.

    Returns int32 [4, m]: group of each tile (e or more for no group), its first row, the end of its group, and the
    layer. Superfluous tiles start past their end. m is a multiple of `TOGETHER`.
    """
    groups = sizes_e.shape[0] + 1
    most = (rows + groups * (block - 1)) // block
    index = jnp.arange(-(-most // TOGETHER) * TOGETHER, dtype=jnp.int32)
    ends = jnp.append(jnp.cumsum(sizes_e), rows).astype(jnp.int32)
    starts = jnp.append(0, ends[:-1])
    tiles = (ends - starts + block - 1) // block
    last = jnp.cumsum(tiles)
    group = (index[:, None] >= last).sum(1, dtype=jnp.int32)
    # First row of each group minus the rows of all tiles before it, so that tile i starts at begin + i · block.
    begin = jnp.append(starts - (last - tiles) * block, rows)
    last_row = jnp.append(ends, rows)[group]
    return jnp.stack([group, begin[group] + index * block, last_row, jnp.full_like(group, layer)]).astype(jnp.int32)


def cut_rows(
    name: str, x_tp: jax.Array, w: Layer, sizes_e: jax.Array | Classes, width: int, architecture: Architecture
) -> tuple[Tile, jax.Array, tuple[int]]:
    """Return the tile of kernel `name`, what `own_piece` takes for these rows, and the grid."""
    few = isinstance(sizes_e, Classes)
    cut = tile("grouped_step" if few else name, architecture, x_tp.dtype)
    tiles = sizes_e.class_t if few else row_tiles(sizes_e, x_tp.shape[0], cut.sizes[0], w[1])
    return cut, tiles, (tile_count(tiles, cut.sizes[0], w[0].shape[1]) * pl.cdiv(width, cut.sizes[1]),)


def tile_count(tiles: Any, block: int, groups: int) -> int:
    """Return the number of tiles of `row_tiles`; or for rows with these classes [t], an upper bound for any classes."""
    return tiles.shape[1] if len(tiles.shape) == 2 else (groups + 1) * pl.cdiv(tiles.shape[0], block)


def row_tile(tiles_ref: Any, index: jax.Array, block: int, groups: int) -> RowTile:
    """Return tile `index` of `row_tiles`; or of few rows that are not sorted, whose int32 classes [t] are given."""
    if len(tiles_ref.shape) == 1:  # a program picks its rows among all, which takes less time than to sort them
        t, own, number = tiles_ref.shape[0], jax.lax.rem(index, groups + 1), jax.lax.div(index, groups + 1)
        row = jnp.arange(pl.next_power_of_2(t), dtype=jnp.int32)
        member = jnp.minimum(load(tiles_ref.at[row], mask=row < t, other=-1), groups) == own
        place = jnp.cumsum(member.astype(jnp.int32)) - 1 - number * block
        picked = member[None, :] & (place[None, :] == jnp.arange(block, dtype=jnp.int32)[:, None])
        inside = picked.astype(jnp.int32).sum(1) > 0
        rows = jnp.where(inside, jnp.where(picked, row[None, :], 0).sum(1), t)
        meets = (own < groups).astype(jnp.int32) * inside.astype(jnp.int32).max()
        return RowTile(rows, inside, (jnp.int32(0), jnp.minimum(own, groups - 1)), meets)
    group, first, end, layer = (tiles_ref[i, index] for i in range(4))
    rows = first + jnp.arange(block, dtype=jnp.int32)
    return RowTile(rows, rows < end, (layer, jnp.minimum(group, groups - 1)), (group < groups).astype(jnp.int32))


def place(index: jax.Array, rows: int, columns: int, architecture: Architecture) -> tuple[jax.Array, jax.Array]:
    """Return which of `rows` × `columns` tiles program `index` processes.

    `TOGETHER` tiles of rows go through all columns before the next ones, so that concurrent programs share rows and
    columns about equally. On AMD, programs of the same chiplet process neighbouring tiles.
    """
    together = math.gcd(TOGETHER, rows)
    each = together * columns
    block, inside = jax.lax.div(index, each), jax.lax.rem(index, each)
    if platform(architecture) == "rocm" and each % CHIPLETS == 0:
        inside = jax.lax.rem(inside, CHIPLETS) * (each // CHIPLETS) + jax.lax.div(inside, CHIPLETS)
    return block * together + jax.lax.rem(inside, together), jax.lax.div(inside, together)


def piece(index: Any, size: int, end: int, halves: int = 1) -> tuple[jax.Array, jax.Array | None]:
    """Return the indices of piece `index` of length `size`, and the mask of those before `end` (None if all are).

    A program that processes several `halves` may have some past the end.
    """
    places = index * size + jnp.arange(size, dtype=jnp.int32)
    return places, None if end % (halves * size) == 0 else places < end


def both(first: jax.Array | None, second: jax.Array | None) -> jax.Array | None:
    """Combine masks [m] and [n] to [m, n]; None means all true."""
    if first is None:
        return None if second is None else second[None, :]
    return first[:, None] if second is None else first[:, None] & second[None, :]


Columns = Sequence[tuple[jax.Array, jax.Array | None]]  # indices, and mask of the valid ones; None if all are


def own_piece(tiles_ref: Any, w_ref: Any, static: Static, width: int) -> tuple[RowTile, jax.Array, jax.Array | None]:
    """Return the rows of a program, and the piece of `width` columns that it processes, like `piece`."""
    ((m, n, _), architecture), groups = static, w_ref.shape[1]
    count = tile_count(tiles_ref, m, groups)
    row_index, column_index = place(pl.program_id(0), count, pl.cdiv(width, n), architecture)
    return row_tile(tiles_ref, row_index, m, groups), *piece(column_index, n, width)


def rows_times_matrix(
    x_ref: Any, rows: jax.Array, w_ref: Any, own: RowTile, columns: Columns, depth: int, transpose: bool = False
) -> tuple[jax.Array, ...]:
    """Compute `x[rows] @ w[matrix][:, columns]` in fp32, for each of `columns`; with `transpose`, `w[matrix].T`.

    `x_ref` is [t, p] and `w_ref` [l, e, p, q], or [l, e, q, p] with `transpose`. All `rows` must be valid; `own` is
    their tile. Each step multiplies a piece of p of length `depth`.
    """
    p = x_ref.shape[1]

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        inner, exists = piece(i, depth, p)
        x = load(x_ref.at[rows[:, None], inner[None, :]], mask=both(None, exists))
        products = []
        for (column, fits), total in zip(columns, sums, strict=True):
            if transpose:
                w = load(w_ref.at[*own.matrix, column[:, None], inner[None, :]], mask=both(fits, exists))
            else:
                w = load(w_ref.at[*own.matrix, inner[:, None], column[None, :]], mask=both(exists, fits))
            products.append(total + product(x, w, (1, 1 if transpose else 0)))
        return tuple(products)

    zeros = tuple(jnp.zeros((rows.shape[0], column.shape[0]), jnp.float32) for column, _ in columns)
    return jax.lax.fori_loop(0, own.meets * pl.cdiv(p, depth), step, zeros)


def _product_kernel(
    static: Static, transpose: bool, inputs: tuple[Any, ...], moved: tuple[Any, Any], _stack_ref: Any, out_ref: Any
) -> None:
    (tiles_ref, x_ref, w_ref), (t, width), (order_ref, scale_ref) = inputs, out_ref.shape[-2:], moved
    own, column, fits = own_piece(tiles_ref, w_ref, static, width)
    rows = jnp.where(own.inside, own.rows, 0)
    (out,) = rows_times_matrix(x_ref, rows, w_ref, own, [(column, fits)], static[0][2], transpose)
    written = own.rows
    if order_ref is not None:
        # Masked rows get an index past the end: an emulated store would otherwise overwrite rows of this tile.
        written = load(order_ref.at[own.rows], mask=own.inside, other=t)
    if scale_ref is not None:
        out = out * load(scale_ref.at[written], mask=own.inside)[:, None]
    here = *own.layer(out_ref), written[:, None], column[None, :]
    store(out_ref.at[here], out.astype(out_ref.dtype), mask=both(own.inside, fits))


def grouped_product(
    x_tp: jax.Array, w: Layer, sizes_e: jax.Array | Classes, transpose: bool = False, moved: Moved = (None, None),
    kept: jax.Array | None = None, *, architecture: Architecture,
) -> jax.Array:  # fmt: skip
    """Compute `x_tp[rows of e] @ w_epq[e]` for every group e; with `transpose`, `x_tq @ w_epq[e].T`.

    Rows are bf16 or fp32 and sorted by group, matrices of the same dtype; `sizes_e` is the int32 number of rows of each
    group, whose sum is at most t. `moved` is an int32 permutation, by which row i of the result is written to row
    `order_t[i]`, and fp32 factors of the written rows; None for neither. Returns [t, q] (with `transpose` [t, p]) in
    the dtype of the rows, sums in fp32; zero in rows past the groups. `sizes_e` can also be the `Classes` of rows that
    are not sorted. With `kept`, [l, t, q], returns that with the result in the layer of `w`, in place.
    """
    name = "grouped_product_transposed" if transpose else "grouped_product"
    w_lepq, t = w[0], x_tp.shape[0]
    width = w_lepq.shape[2 if transpose else 3]
    cut, tiles, grid = cut_rows(name, x_tp, w, sizes_e, width, architecture)
    kernel = functools.partial(_product_kernel, (cut.sizes, architecture), transpose)
    arrays = (tiles, x_tp, w_lepq), moved, kept
    out = Out((t, width) if kept is None else kept.shape, x_tp.dtype)
    aliases = {} if kept is None else {len(jax.tree.leaves(arrays)) - 1: 0}
    return launch(name, kernel, arrays, out, grid, cut, architecture, aliases)


def _outer_kernel(
    static: Static, moved: str, bounds_ref: Any, x_ref: Any, y_ref: Any, order_ref: Any, total_ref: Any, out_ref: Any
) -> None:
    (m, n, depth), architecture = static
    p, q = out_ref.shape[2:]
    down, across = pl.cdiv(p, m), pl.cdiv(q, n)
    program = pl.program_id(0)
    group = jax.lax.div(program, down * across)
    row_index, column_index = place(jax.lax.rem(program, down * across), down, across, architecture)
    x_column, x_fits = piece(row_index, m, p)
    y_column, y_fits = piece(column_index, n, q)
    first, end, layer = (bounds_ref[i, group] for i in range(3))

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        rows = first + i * depth + jnp.arange(depth, dtype=jnp.int32)
        inside = rows < end
        place = load(order_ref.at[rows], mask=inside) if moved else rows
        x_rows, y_rows = place if moved == "x" else rows, place if moved == "y" else rows
        # Rows of other groups are masked in both, since they may not be finite. x is loaded transposed, which AMD's
        # compiler does on the way to shared memory; it cannot do that for a tile transposed after loading.
        x = load(x_ref.at[x_rows[None, :], x_column[:, None]], mask=both(x_fits, inside))
        y = load(y_ref.at[y_rows[:, None], y_column[None, :]], mask=both(inside, y_fits))
        return total + product(x, y)

    steps = jax.lax.div(end - first + (depth - 1), depth)
    out = jax.lax.fori_loop(0, steps, step, jnp.zeros((m, n), jnp.float32))
    here, mask = (layer, group, x_column[:, None], y_column[None, :]), both(x_fits, y_fits)
    if total_ref is not None:
        out += load(total_ref.at[here], mask=mask)
    store(out_ref.at[here], out.astype(out_ref.dtype), mask=mask)


def grouped_outer(
    x_tp: jax.Array, y_tq: jax.Array, sizes_e: jax.Array, order_t: Any = None, moved: str = "", total_lepq: Any = None,
    layer: Any = 0, *, architecture: Architecture,
) -> jax.Array:  # fmt: skip
    """Compute `x_tp[rows of e].T @ y_tq[rows of e]` for every group e: the gradient of the matrices.

    Rows are bf16 or fp32, sorted by group; sorted row i of the array that is `moved` ('x', 'y', or '' for neither) is
    its row `order_t[i]`. With `total_lepq`, fp32, the result is added to its `layer` in place. Returns `total_lepq`
    with the sum in its layer; without it, the products alone [1, e, p, q] in the dtype of `x_tp`, zero for empty
    groups. Sums are in fp32.
    """
    cut = tile("grouped_outer", architecture, x_tp.dtype)
    m, n, _ = cut.sizes
    e, p, q = sizes_e.shape[0], x_tp.shape[1], y_tq.shape[1]
    ends = jnp.cumsum(sizes_e)
    bounds = jnp.stack([ends - sizes_e, ends, jnp.full_like(ends, layer)]).astype(jnp.int32)
    out = Out((1, e, p, q), x_tp.dtype) if total_lepq is None else Out(total_lepq.shape, total_lepq.dtype)
    arrays, grid = (bounds, x_tp, y_tq, order_t, total_lepq), (e * pl.cdiv(p, m) * pl.cdiv(q, n),)
    kernel = functools.partial(_outer_kernel, (cut.sizes, architecture), moved)
    aliases = {} if total_lepq is None else {len(jax.tree.leaves(arrays)) - 1: 0}
    return launch("grouped_outer", kernel, arrays, out, grid, cut, architecture, aliases)
