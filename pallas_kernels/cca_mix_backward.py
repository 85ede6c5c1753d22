"""Gradients of the CCA mix from its results, in three kernels.

The queries and keys, and the inverse norms that the forward kernel writes, determine the gradient of the convolutions'
output without the convolutions. The first kernel writes this gradient, z; the second multiplies it by the matrices of
the grouped convolution for the gradient of the projections, and the third by its inputs for that of the matrices. Their
programs are short, and hold one head of a tile of tokens or one matrix.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.cca_mix import (
    MixArrays,
    filled,
    rotary_columns,
    rotary_rows,
    rotated,
    rows_at,
    segments_at,
    sizes_of,
    span,
    store_rows,
    tap_row,
    temperature,
)
from pallas_kernels.cca_mix_by_head import partners
from pallas_kernels.launch import Out, launch, load, store
from pallas_kernels.product import product
from pallas_kernels.tiles import Architecture, tile


class _RowOutputs(NamedTuple):
    """Outputs of the second kernel; i counts tiles of tokens over the whole batch."""

    packed_bsmc: jax.Array
    halo_u_bwnc: jax.Array | None
    halo_delayed_b1x: jax.Array | None
    vectors_iwnc: jax.Array  # sums of the tile: gradients of the depthwise taps, then of the grouped convolution's bias
    start_ix: jax.Array | None


def cca_mix_backward(
    x: MixArrays, results: tuple[jax.Array, ...], gradients: tuple[jax.Array, ...], *, architecture: Architecture
) -> MixArrays:
    """Compute the gradients of the inputs of `cca_mix`, those of parameters in fp32; None for documents and tables.

    `results` are the queries, keys and inverse norms of `cca_mix`; `gradients` those of queries, keys and values.
    """
    *d_heads, d_v = gradients
    z_bsnc, temperature_ni = _through_norm(x, results, d_heads, architecture)
    rows = _through_convolutions(x, z_bsnc, d_v, architecture)
    *depthwise, bias_nc = rows.vectors_iwnc.sum(0)
    # The depthwise bias reaches every token through all taps, also across document boundaries.
    depthwise_bias = jnp.einsum("wnxc,nc->nx", x.grouped_wncc.astype(jnp.float32), bias_nc, precision="highest")
    weights = jnp.stack(depthwise), depthwise_bias, _through_products(x, z_bsnc, architecture), bias_nc
    temperature_k = temperature_ni[-x.temperature_k.shape[0] :].sum(1)
    start = None if rows.start_ix is None else rows.start_ix.sum(0)
    values: Any = (*rows[:3], *(None,) * 4, *weights, temperature_k, start)
    return MixArrays(*values)


def _through_norm(
    x: MixArrays, results: tuple[jax.Array, ...], d_heads: list[jax.Array], architecture: Architecture
) -> tuple[jax.Array, jax.Array]:
    """Return z [b, s, n, c] in the dtype of u, and tiles' gradients of each head's factor after QK-norm, [n, tiles]."""
    (b, s, n, _, c, *_), name = sizes_of(x), "cca_mix_backward_norm"
    cut = tile(name, architecture, x.packed_bsmc.dtype)
    (tokens,) = cut.sizes
    tiles = pl.cdiv(s, tokens)
    out = Out((b, s, n, c), x.packed_bsmc.dtype), Out((n, b * tiles), jnp.float32)
    arrays = ((results, d_heads), (x.cos_bsp, x.sin_bsp), x.temperature_k)
    return launch(name, functools.partial(_norm_kernel, tokens), arrays, out, (n, tiles, b), cut, architecture)


def _norm_kernel(tokens: int, heads: Any, tables: Any, temperature_ref: Any, z_ref: Any, factor_ref: Any) -> None:
    (q_ref, k_ref, inverse_ref), (d_q_ref, d_k_ref) = heads
    (_, s, queries, c), head, number, batch = q_ref.shape, pl.program_id(0), pl.program_id(1), pl.program_id(2)
    time, query, group = number * tokens + span(0, tokens), head < queries, jnp.maximum(head - queries, 0)
    columns, inside = rotary_columns(c, tables[0].shape[2]), time < s

    def load_both(of_queries: Any, of_keys: Any) -> list[jax.Array]:
        def part(ref: Any, number: jax.Array, of_kind: jax.Array, column: jax.Array) -> jax.Array:
            mask = filled((inside & of_kind)[:, None], tokens, column.size)
            at = ref.at[batch, time[:, None], number, column[None, :]]
            return load(at, mask=mask).astype(jnp.float32)

        a_query = jnp.where(query, head, 0)
        return [part(of_queries, a_query, query, each) + part(of_keys, group, ~query, each) for each in columns]

    scale = jnp.where(query, 1.0, temperature(temperature_ref, group))
    normed = [part * (1.0 / scale) for part in load_both(q_ref, k_ref)]
    gradient = load_both(d_q_ref, d_k_ref)
    along = sum(jnp.sum(a * b, axis=1) for a, b in zip(normed, gradient, strict=True))
    store(factor_ref.at[head, batch * pl.num_programs(1) + number], jnp.sum(along))
    outer = load(inverse_ref.at[batch, head, time], mask=inside) * (c**0.5 * scale)
    across = [(g - a * (along * (1 / c))[:, None]) * outer[:, None] for a, g in zip(normed, gradient, strict=True)]
    # Rotations keep dot products, so only the result is turned back.
    cos, sin = rotary_rows(tables, batch, time, inside)
    for part, column in zip(rotated(across, cos, -sin), columns, strict=True):
        store_rows(z_ref, batch, time, head, column, part, inside)


def _through_convolutions(
    x: MixArrays, z_bsnc: jax.Array, d_v_bskc: jax.Array, architecture: Architecture
) -> _RowOutputs:
    (b, s, n, num_kv, c, _, before), name = sizes_of(x), "cca_mix_backward_rows"
    cut = tile(name, architecture, x.packed_bsmc.dtype)
    tokens, depth = cut.sizes
    tiles = pl.cdiv(s + before, tokens)
    alike = jax.tree.map(lambda a: Out(a.shape, a.dtype), (x.packed_bsmc, x.halo_u_bwnc, x.halo_delayed_b1x))
    vectors = Out((b * tiles, x.depthwise_wnc.shape[0] + 1, n, c), jnp.float32)
    start = None if x.start_x is None else Out((b * tiles, *x.start_x.shape), jnp.float32)
    kernel = functools.partial(_rows_kernel, tokens=tokens, depth=min(depth, c))
    out, grid = (*alike, vectors, start), (n + num_kv, tiles, b)
    return _RowOutputs(*launch(name, kernel, (x, z_bsnc, d_v_bskc), out, grid, cut, architecture))


def _rows_kernel(x: Any, z_ref: Any, d_v_ref: Any, *outputs: Any, tokens: int, depth: int) -> None:
    out = _RowOutputs(*outputs)
    head, batch = pl.program_id(0), pl.program_id(2)
    # Rows of the halo are treated like others: time starts at minus their number.
    time = pl.program_id(1) * tokens - sizes_of(x).halo + span(0, tokens)
    number = batch * pl.num_programs(1) + pl.program_id(1)

    @pl.when(head < z_ref.shape[2])
    def _() -> None:
        _finish_head(x, z_ref, out, (number, batch, time, head), depth)

    @pl.when(head >= z_ref.shape[2])
    def _() -> None:
        _shift_back(x, d_v_ref, out, (number, batch, time, head - z_ref.shape[2]))


_Place = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # number of the tile, batch, time, head


def _finish_head(x: Any, z_ref: Any, out: Any, place: _Place, depth: int) -> None:
    """Write the gradient of a head of u, and the tile's sums for the vectors of the convolutions."""
    number, batch, time, head = place
    (_, _, n, num_kv, c, *_), channels = sizes_of(x), span(0, x.grouped_wncc.shape[2])
    taps0, taps1 = x.depthwise_wnc.shape[0], x.grouped_wncc.shape[0]
    segment = segments_at(x, batch, time)

    def step(tap0: jax.Array, total: jax.Array) -> jax.Array:
        later = time + (taps0 - 1 - tap0)
        segment_later = segments_at(x, batch, later)
        y = jnp.zeros((time.size, c), jnp.float32)  # gradient of the depthwise output at `later`
        for tap1 in range(taps1):
            after = later + (taps1 - 1 - tap1)
            same = segments_at(x, batch, after) == segment_later

            def add(i: Any, y: jax.Array, tap1: int = tap1, after: Any = after, same: Any = same) -> jax.Array:
                deep = i * depth + span(0, depth)
                kernel = load(x.grouped_wncc.at[tap1, head, channels[:, None], deep[None, :]])
                return y + product(_rows(z_ref, batch, after, head, deep, same), kernel, (1, 1))

            y = jax.lax.fori_loop(0, c // depth, add, y)
        y = jnp.where((segment_later == segment)[:, None], y, 0.0)
        u = rows_at(x, batch, time, head, channels)
        store(out.vectors_iwnc.at[number, tap0, head, channels], jnp.sum(u * y, axis=0))
        return total + y * load(x.depthwise_wnc.at[tap0, head, channels]).astype(jnp.float32)[None, :]

    total = jax.lax.fori_loop(0, taps0, step, jnp.zeros((time.size, c), jnp.float32))
    # QK-mean comes last, since registers cannot hold its rows beside the matmuls' tiles.
    own = _rows(z_ref, batch, time, head, channels).astype(jnp.float32)
    store(out.vectors_iwnc.at[number, taps0, head, channels], jnp.sum(own, axis=0))
    first, count = partners(head, n - num_kv, num_kv)

    def partner(i: jax.Array, others: jax.Array) -> jax.Array:
        return others + _rows(z_ref, batch, time, first + i, channels).astype(jnp.float32)

    others = jax.lax.fori_loop(0, count, partner, jnp.zeros_like(own))
    total += 0.5 * (own + others * jnp.where(head < n - num_kv, jnp.float32(num_kv / (n - num_kv)), 1.0))
    _store(out.packed_bsmc, batch, time, (head, channels[None, :]), total)
    if out.halo_u_bwnc is not None:
        _store(out.halo_u_bwnc, batch, time + out.halo_u_bwnc.shape[1], (head, channels[None, :]), total)


def _shift_back(x: Any, d_v_ref: Any, out: Any, place: _Place) -> None:
    """Write the gradients of both halves of the value, and of the delayed value at the start of a document."""
    number, batch, time, group = place
    _, _, n, _, c, half, *_ = sizes_of(x)
    channel, segment = span(0, c), segments_at(x, batch, time)
    at = group * c + channel
    late = at >= half
    column = jnp.where(late, at - half, 0)
    value = _rows(d_v_ref, batch, time, group, channel)
    delayed = _rows(d_v_ref, batch, time + 1, group, channel, segments_at(x, batch, time + 1) == segment)
    _store(out.packed_bsmc, batch, time, (n + group, channel[None, :]), jnp.where(late[None, :], delayed, value))
    if out.halo_delayed_b1x is not None:
        _store(out.halo_delayed_b1x, batch, time + 1, (column[None, :],), delayed, late[None, :])
    if out.start_ix is not None:
        starts = jnp.where((segments_at(x, batch, time - 1) == segment)[:, None], 0.0, value.astype(jnp.float32))
        store(out.start_ix.at[number, column], jnp.sum(starts, axis=0), mask=late)


def _rows(
    ref: Any, batch: jax.Array, time: jax.Array, head: jax.Array, channels: jax.Array, chosen: jax.Array | bool = True
) -> jax.Array:
    """Load the `chosen` rows of a head, [tokens, channels] in their dtype; zero elsewhere and outside of the piece."""
    mask = filled((chosen & (time >= 0) & (time < ref.shape[1]))[:, None], time.size, channels.size)
    return load(ref.at[batch, time[:, None], head, channels[None, :]], mask=mask)


def _store(ref: Any, batch: Any, row: jax.Array, rest: tuple[Any, ...], value: jax.Array, columns: Any = True) -> None:
    mask = filled(((row >= 0) & (row < ref.shape[1]))[:, None] & columns, *value.shape)
    # Masked rows get an index past the end: interpreted, a negative index would count from the end.
    at = (batch, jnp.where(row < 0, ref.shape[1], row)[:, None], *rest)
    store(ref.at[at], value.astype(ref.dtype), mask=mask)


def _through_products(x: MixArrays, z_bsnc: jax.Array, architecture: Architecture) -> jax.Array:
    """Return the gradient of the matrices, fp32 [k1, n, c in, c out]."""
    (b, s, n, _, c, *_), name = sizes_of(x), "cca_mix_backward_matrices"
    cut = tile(name, architecture, x.packed_bsmc.dtype)
    tokens, most = cut.sizes
    taps, parts = x.grouped_wncc.shape[0], min(most, b * pl.cdiv(s, tokens))
    kernel, out = functools.partial(_matrices_kernel, tokens=tokens), Out((parts, taps, n, c, c), jnp.float32)
    sums_jwncc = launch(name, kernel, (x, z_bsnc), out, (n * taps, parts), cut, architecture)
    # Few large parts: add them elementwise, so that XLA fuses the cast into the same pass.
    return functools.reduce(jnp.add, sums_jwncc)


def _matrices_kernel(x: Any, z_ref: Any, out_ref: Any, *, tokens: int) -> None:
    """Sum the gradient of one matrix over a part of the tokens."""
    (b, s, n, c), taps, part = z_ref.shape, x.grouped_wncc.shape[0], pl.program_id(1)
    head, tap, channels = jax.lax.rem(pl.program_id(0), n), jax.lax.div(pl.program_id(0), n), span(0, c)
    in_row = pl.cdiv(s, tokens)
    each = pl.cdiv(b * in_row, pl.num_programs(1))

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        batch, time = jax.lax.div(i, in_row), jax.lax.rem(i, in_row) * tokens + span(0, tokens)
        row = tap_row(x, batch, time, head, channels, taps - 1 - tap)
        return total + product(row, _rows(z_ref, batch, time, head, channels), (0, 0))

    last = jnp.minimum((part + 1) * each, b * in_row)
    total = jax.lax.fori_loop(part * each, last, step, jnp.zeros((c, c), jnp.float32))
    store(out_ref.at[part, tap, head, channels[:, None], channels[None, :]], total)
