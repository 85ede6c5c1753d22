"""Grouped matmul with the gate and up matrices, fused with SwiGLU, in one launch each way.

The forward kernel writes gate and up only if a backward pass will need them. The backward kernel multiplies by the down
matrices, and turns the hidden gradient into that of gate and up in registers. It also recomputes SwiGLU, which the
gradient of the down matrices needs, so that no separate pass over the hidden rows is needed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import grouped_matmul as grouped
from pallas_kernels.grouped_matmul import Classes, Layer, Static, both, cut_rows, own_piece, piece, rows_times_matrix
from pallas_kernels.launch import Out, launch, load, store
from pallas_kernels.tiles import Architecture, tile

HALVES = 2  # parts of a tile that the backward kernel processes in turn, since registers cannot hold it whole


def _forward_kernel(
    static: Static, inputs: tuple[Any, ...], _stack_ref: Any, hidden_ref: Any, gate_up_ref: Any = None
) -> None:
    (tiles_ref, order_ref, x_ref, w_ref), f = inputs, hidden_ref.shape[1]
    own, column, fits = own_piece(tiles_ref, w_ref, static, f)
    sorts = order_ref is not None
    rows = load(order_ref.at[own.rows], mask=own.inside) if sorts else jnp.where(own.inside, own.rows, 0)
    gate, up = rows_times_matrix(x_ref, rows, w_ref, own, [(column, fits), (f + column, fits)], static[0][2])
    # Rounded before SwiGLU, which the backward pass recomputes from the rounded values.
    gate, up = gate.astype(hidden_ref.dtype), up.astype(hidden_ref.dtype)
    mask = both(own.inside, fits)
    if gate_up_ref is not None:
        here = (*own.layer(gate_up_ref), own.rows[:, None])
        store(gate_up_ref.at[*here, column[None, :]], gate, mask=mask)
        store(gate_up_ref.at[*here, f + column[None, :]], up, mask=mask)
    gate, up = gate.astype(jnp.float32), up.astype(jnp.float32)
    hidden = gate * _sigmoid(gate) * up
    store(hidden_ref.at[own.rows[:, None], column[None, :]], hidden.astype(hidden_ref.dtype), mask=mask)


def _sigmoid(x: jax.Array) -> jax.Array:
    return 1 / (1 + jnp.exp(-x))


def grouped_swiglu(
    x_td: jax.Array, order_t: jax.Array | None, gate_up: Layer, sizes_e: jax.Array | Classes, *, keep: bool,
    kept: jax.Array | None = None, architecture: Architecture,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """Multiply sorted rows by the gate and up matrices of their group, and apply SwiGLU.

    Rows of `x_td`, bf16 or fp32, are in any order; `order_t`, int32, sorts them by group. `gate_up` is [e, d, 2f], gate
    then up, of the same dtype; `sizes_e` is the int32 number of rows of each group, whose sum is at most t. Returns the
    hidden rows [t, f], and with `keep` gate and up [t, 2f], for the sorted rows in the dtype of `x_td`, with sums in
    fp32; zero in rows past the groups. Rows with `Classes` for sizes are not sorted, and have no order. Gate and up are
    written to the layer of `kept` [l, t, 2f], if it is given.
    """
    t, f = x_td.shape[0], gate_up[0].shape[3] // 2
    cut, tiles, grid = cut_rows("grouped_swiglu", x_td, gate_up, sizes_e, f, architecture)
    kernel = functools.partial(_forward_kernel, (cut.sizes, architecture))
    shapes = ((t, f), (t, 2 * f) if kept is None else kept.shape)[: 1 + keep]
    inputs = tiles, order_t, x_td, gate_up[0]
    out, aliases = tuple(Out(shape, x_td.dtype) for shape in shapes), {} if kept is None else {len(inputs): 1}
    return launch("grouped_swiglu", kernel, (inputs, kept), out, grid, cut, architecture, aliases)


def _backward_kernel(
    static: Static, inputs: tuple[Any, ...], dgate_up_ref: Any, hidden_ref: Any, dscale_ref: Any
) -> None:
    (m, n, depth), architecture = static
    tiles_ref, order_ref, scale_ref, dout_ref, down_ref, gate_up_ref = inputs
    f = hidden_ref.shape[1]
    row_index, column_index = grouped.place(pl.program_id(0), tiles_ref.shape[1], dscale_ref.shape[0], architecture)
    own = grouped.row_tile(tiles_ref, row_index, m, down_ref.shape[1])
    columns = [piece(HALVES * column_index + half, n, f, HALVES) for half in range(HALVES)]
    rows = load(order_ref.at[own.rows], mask=own.inside)
    parts = rows_times_matrix(dout_ref, rows, down_ref, own, columns, depth, transpose=True)

    here = own.rows[:, None]
    kept = (*own.layer(gate_up_ref), here)
    scale = load(scale_ref.at[rows], mask=own.inside)[:, None]
    dscale = jnp.zeros(m, jnp.float32)
    for dhidden, (column, fits) in zip(parts, columns, strict=True):
        mask = both(own.inside, fits)
        gate = load(gate_up_ref.at[*kept, column[None, :]], mask=mask).astype(jnp.float32)
        up = load(gate_up_ref.at[*kept, f + column[None, :]], mask=mask).astype(jnp.float32)
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        hidden = silu * up
        scaled = dhidden * scale
        results = hidden * scale, scaled * up * (sigmoid + silu * (1 - sigmoid)), scaled * silu
        dscale += (dhidden * hidden).sum(1)
        for ref, first, result in zip((hidden_ref, dgate_up_ref, dgate_up_ref), (0, 0, f), results, strict=True):
            store(ref.at[here, first + column[None, :]], result.astype(ref.dtype), mask=mask)
    store(dscale_ref.at[column_index, own.rows], dscale, mask=own.inside)


def grouped_swiglu_backward(
    dout_td: jax.Array, order_t: jax.Array, scale_t: jax.Array, down: Layer, gate_up_tf: jax.Array, sizes_e: Any,
    architecture: Architecture,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Compute the gradient of gate and up from the gradient of `scale_t · (hidden @ down)`.

    Rows of `dout_td` and of the fp32 `scale_t` are in any order; `order_t` sorts them by group. `down` is [e, f, d],
    and `gate_up_tf` what `grouped_swiglu` kept, [t, 2f] or in the layer of [l, t, 2f]. Returns for the sorted rows: the
    gradient of gate and up [t, 2f]; hidden times scale [t, f], whose outer product with `dout_td` is the gradient of
    the down matrices; and the gradient of scale, fp32 [t].
    """
    (down_lefd, layer), dtype = down, dout_td.dtype
    cut = tile("grouped_swiglu_backward", architecture, dtype)
    m, n, _ = cut.sizes
    t, f = dout_td.shape[0], down_lefd.shape[2]
    tiles, columns = grouped.row_tiles(sizes_e, t, m, layer), pl.cdiv(f, HALVES * n)
    kernel = functools.partial(_backward_kernel, (cut.sizes, architecture))
    out = Out((t, 2 * f), dtype), Out((t, f), dtype), Out((columns, t), jnp.float32)
    arrays, grid = ((tiles, order_t, scale_t, dout_td, down_lefd, gate_up_tf),), (tiles.shape[1] * columns,)
    dgate_up, hidden, dscale = launch("grouped_swiglu_backward", kernel, arrays, out, grid, cut, architecture)
    return dgate_up, hidden, dscale.sum(0)
