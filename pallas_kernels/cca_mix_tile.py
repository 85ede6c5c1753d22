"""The part of the mix's gradient that processes tiles of tokens: from heads to the projections.

Tiles overlap by the reach of the convolutions: the last rows of a tile contribute to the gradients of earlier rows, but
their own gradients need later rows, and are finished by the next tile.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

from pallas_kernels.cca_mix import rows_at, segments_at, sizes_of, span
from pallas_kernels.cca_mix_heads import Inputs, channels_of, head_gradient, inside_of
from pallas_kernels.product import product


class _Tile(NamedTuple):
    """A tile of tokens in one row of the batch."""

    number: jax.Array  # index among the tiles of the whole batch
    batch: jax.Array  # row of the batch
    time: jax.Array  # [tokens], indices of the tokens in the piece; negative in the halo
    segment: jax.Array  # [tokens], documents
    finished: jax.Array  # bool [tokens], rows whose gradients need no rows after the tile

    def inside(self, length: int, c: int, after: int = 0) -> jax.Array:
        """Return the mask [tokens, c] of finished rows that, `after` rows later, are inside an array of that length."""
        return inside_of(self.time + after, length, c) & self.finished[:, None]

    def later(self, value: jax.Array, rows: jax.Array) -> jax.Array:
        """Return `value` [tokens, c] from `rows` rows later, zero if the document differs."""
        row = span(0, self.time.size)
        match = (row[None, :] == row[:, None] + rows) & (self.segment[None, :] == self.segment[:, None])
        return product(match.astype(value.dtype), value).astype(value.dtype)


def reach(x: Any) -> int:
    """Return the number of rows that both convolutions together look back."""
    return x.depthwise_wnc.shape[0] + x.grouped_wncc.shape[0] - 2


def finish_tile(inputs: Inputs, out: Any, group: jax.Array, number: jax.Array, tokens: int, depth: int, *,
                tiles: int) -> None:  # fmt: skip
    """Write the gradients of u, its halo and both halves of the value, and the tile's sums for small parameters.

    Args:
      inputs: inputs of the kernel.
      out: outputs of the kernel.
      group: index of the key head; its query heads are included.
      number: index of the tile in the whole batch.
      tokens: rows of the tile.
      depth: channels in a step of a matmul.
      tiles: number of tiles in a row of the batch.
    """
    x = inputs.x
    _, _, n, num_kv, c, _, before = sizes_of(x)
    served, row = (n - num_kv) // num_kv, span(0, tokens)
    batch = jax.lax.div(number, tiles)
    time = jax.lax.rem(number, tiles) * (tokens - reach(x)) - before + row
    tile = _Tile(number, batch, time, segments_at(x, batch, time), row < tokens - reach(x))

    key, along = head_gradient(x, inputs.key(group), batch, time, depth)
    triton.store(out.temperature_ik.at[number, group], jnp.sum(jnp.where(tile.finished, along, 0.0)))

    def query(i: jax.Array, total: jax.Array) -> jax.Array:
        head = group * served + i
        convolved, _ = head_gradient(x, inputs.query(head), batch, time, depth)
        _finish(x, out, tile, head, convolved, key.astype(jnp.float32) * (1 / served), depth)
        return total + convolved.astype(jnp.float32)

    total = jax.lax.fori_loop(0, served, query, jnp.zeros((tokens, c), jnp.float32))
    _finish(x, out, tile, n - num_kv + group, key, total, depth)
    _shift_back(inputs, out, tile, group)


def _finish(x: Any, out: Any, tile: _Tile, head: jax.Array, convolved: jax.Array, others: jax.Array,
            depth: int) -> None:  # fmt: skip
    """Write a head's gradients, from that of its convolution output and those of the heads it is averaged with."""
    _, s, _, _, c, *_ = sizes_of(x)
    y, taps, channels = _through_grouped(x, tile, head, convolved, depth), x.depthwise_wnc.shape[0], span(0, c)

    def step(tap: jax.Array, total: jax.Array) -> jax.Array:
        away = taps - 1 - tap
        same = (segments_at(x, tile.batch, tile.time - away) == tile.segment) & tile.finished
        gradient = rows_at(x, tile.batch, tile.time - away, head, channels) * y.astype(jnp.float32)
        gradient = jnp.where(same[:, None], gradient, 0.0)
        triton.store(out.depthwise_iwnc.at[tile.number, tap, head, channels], jnp.sum(gradient, axis=0))
        weight = triton.load(x.depthwise_wnc.at[tap, head, channels]).astype(jnp.float32)
        return total + tile.later(y, away).astype(jnp.float32) * weight[None, :]

    total = jax.lax.fori_loop(0, taps, step, 0.5 * (convolved.astype(jnp.float32) + others))
    total = total.astype(x.packed_bsmc.dtype)
    _store(out.packed_bsmc, (tile.batch, tile.time[:, None], head, channels[None, :]), total, tile.inside(s, c))
    if out.halo_u_bwnc is not None:
        rows = out.halo_u_bwnc.shape[1]
        _store(out.halo_u_bwnc, (tile.batch, tile.time[:, None] + rows, head, channels[None, :]), total,
               tile.inside(rows, c, after=rows))  # fmt: skip


def _through_grouped(x: Any, tile: _Tile, head: jax.Array, convolved: jax.Array, depth: int) -> jax.Array:
    """Compute the gradient of a head's depthwise output, [tokens, c] in its dtype."""
    taps, c = x.grouped_wncc.shape[0], x.grouped_wncc.shape[2]
    chunks = c // depth

    def step(i: jax.Array, y: jax.Array) -> jax.Array:
        tap, chunk = jax.lax.div(i, chunks), jax.lax.rem(i, chunks)
        columns = chunk * depth + span(0, depth)
        kernel = triton.load(x.grouped_wncc.at[tap, head, span(0, c)[:, None], columns[None, :]])
        return y + product(tile.later(channels_of(convolved, chunk, depth), taps - 1 - tap), kernel, (1, 1))

    y = jax.lax.fori_loop(0, taps * chunks, step, jnp.zeros(convolved.shape, jnp.float32))
    return y.astype(x.packed_bsmc.dtype)


def _shift_back(inputs: Inputs, out: Any, tile: _Tile, group: jax.Array) -> None:
    """Write the gradients of both halves of the value, and of the delayed value at the start of a document."""
    x, v_ref, batch, time = inputs.x, inputs.v_bskc, tile.batch, tile.time
    _, s, n, _, c, half, *_ = sizes_of(x)
    at = group * c + span(0, c)
    late = at >= half
    inside = tile.inside(s, c)
    value = triton.load(v_ref.at[batch, time[:, None], group, span(0, c)[None, :]], mask=inside, other=0.0)
    used = tile.inside(s, c, after=1) & late[None, :]
    after = triton.load(v_ref.at[batch, time[:, None] + 1, group, span(0, c)[None, :]], mask=used, other=0.0)
    same = tile.segment == segments_at(x, batch, time + 1)
    delayed = jnp.where(same[:, None], after, jnp.zeros_like(after))
    both = jnp.where(late[None, :], delayed, value)
    _store(out.packed_bsmc, (batch, time[:, None], n + group, span(0, c)[None, :]), both, inside)
    column = jnp.where(late, at - half, at + half)  # never negative, see `_store`
    if out.halo_delayed_b1x is not None:
        _store(out.halo_delayed_b1x, (batch, time[:, None] + 1, column[None, :]), delayed,
               tile.inside(1, c, after=1) & late[None, :])  # fmt: skip
    if out.start_ix is not None:
        start = jnp.sum(jnp.where(same[:, None], jnp.zeros_like(after), after).astype(jnp.float32), axis=0)
        triton.store(out.start_ix.at[tile.number, column], start, mask=late)


def _store(ref: Any, at: tuple[jax.Array, ...], value: jax.Array, mask: jax.Array) -> None:
    # Masked rows get an index past the end: interpreted, a negative index would count from the end.
    batch, row, *rest = at
    triton.store(ref.at[(batch, jnp.where(row < 0, ref.shape[1], row), *rest)], value, mask=mask)
