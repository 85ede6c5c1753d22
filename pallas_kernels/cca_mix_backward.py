"""Gradients of the CCA mix by one kernel, the forward's intermediates computed again from the projections.

Two kinds of programs. One has a tile of tokens of one key head and the query heads that it serves, and goes back to the
projections; of its rows the last, which later ones reach by the taps, are finished by the next program. The other has a
head and many tokens, and sums the gradient of its grouped convolution. Both need the gradient of what the convolutions
make: computing it twice is cheaper than writing it and reading it twice. Programs of the same tokens follow one
another, so that the second kind finds in the cache what the first read.

Rows before the piece are rows like others: time starts at minus their number.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.cca_mix import MixArrays, rows_at, segments_at, span, tap_row
from pallas_kernels.cca_mix_heads import Head, channels_of, head_gradient, inside_of
from pallas_kernels.launch import launch
from pallas_kernels.product import product
from pallas_kernels.tiles import tile

# One fp32 part of the grouped gradient is written for so many tokens, but no more parts than that in all: at the sizes
# of the 8B a part is 1.3 MB, what is read and written of these tokens 11 MB.
TOKENS_OF_PART = 1280
MOST_PARTS = 16


class MixGradients(NamedTuple):
    """Gradients of the arrays of `MixArrays`, those of parameters in fp32."""

    u_bsnc: jax.Array
    current_bsx: jax.Array
    delayed_bsx: jax.Array
    halo_u_bwnc: jax.Array
    halo_delayed_b1x: jax.Array
    depthwise_wnc: jax.Array
    depthwise_bias_nc: jax.Array
    grouped_wncc: jax.Array
    grouped_bias_nc: jax.Array
    temperature_k: jax.Array
    start_x: jax.Array


class _Out(NamedTuple):
    """What the kernel writes; i counts tiles of tokens in all rows of the batch, j parts of all tokens."""

    u_bsnc: jax.Array
    current_bsx: jax.Array
    delayed_bsx: jax.Array
    halo_u_bwnc: jax.Array
    halo_delayed_b1x: jax.Array
    depthwise_iwnc: jax.Array
    temperature_ik: jax.Array
    start_ix: jax.Array
    depthwise_bias_jnc: jax.Array
    grouped_jwncc: jax.Array
    grouped_bias_jnc: jax.Array


class _Given(NamedTuple):
    """References to what the kernel reads."""

    x: Any
    q_bshc: Any
    k_bskc: Any
    v_bskc: Any

    def query(self, head: jax.Array) -> Head:
        """A head of queries."""
        heads, num_kv = self.q_bshc.shape[2], self.k_bskc.shape[2]
        return Head(head, head, self.q_bshc, heads + jax.lax.div(head, heads // num_kv), 1, 1.0)

    def key(self, group: jax.Array) -> Head:
        """A head of keys."""
        heads, num_kv = self.q_bshc.shape[2], self.k_bskc.shape[2]
        served, scale = heads // num_kv, self.x.temperature_k[group].astype(jnp.float32)
        return Head(heads + group, group, self.k_bskc, group * served, served, scale)


def cca_mix_backward(x: MixArrays, q_bshc: jax.Array, k_bskc: jax.Array, v_bskc: jax.Array, *,
                     platform: str) -> MixGradients:  # fmt: skip
    """From the gradients of queries, keys and values, in the dtype of u, to those of the mix's arrays.

    Args:
      x: as `cca_mix` was given.
      q_bshc: gradient of the queries.
      k_bskc: of the keys.
      v_bskc: of the values.
      platform: as `launch` takes it.
    """
    b, s, n, c = x.u_bsnc.shape
    cut = tile("cca_mix_backward", platform, x.u_bsnc.dtype)
    tokens, depth, tokens_summed, depth_summed, taps = cut.sizes
    tiles = pl.cdiv(s + x.halo_segments_bw.shape[1], tokens - _reach(x))
    parts = max(1, min(MOST_PARTS, b * s // TOKENS_OF_PART))
    tiles_of_part = pl.cdiv(b * tiles * k_bskc.shape[2], parts)

    def summed_over(like: jax.Array, count: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((count, *like.shape), jnp.float32)

    alike = x.u_bsnc, x.current_bsx, x.delayed_bsx, x.halo_u_bwnc, x.halo_delayed_b1x
    of_tiles = x.depthwise_wnc, x.temperature_k, x.start_x
    of_parts = x.depthwise_bias_nc, x.grouped_wncc, x.grouped_bias_nc
    out = _Out(*launch(
        functools.partial(_kernel, sizes=(tokens, min(depth, c)), tiles=tiles,
                          summed=(tokens_summed, min(depth_summed, c), min(taps, x.grouped_wncc.shape[0]))),
        *x, q_bshc, k_bskc, v_bskc,
        name="cca_mix_backward",
        grid=(n * pl.cdiv(x.grouped_wncc.shape[0], taps) + tiles_of_part, parts),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in alike]
        + [summed_over(a, b * tiles) for a in of_tiles] + [summed_over(a, parts) for a in of_parts],
        warps=cut.warps,
        stages=cut.stages,
        platform=platform,
    ))  # fmt: skip
    # Few and large: added up element by element, so that XLA casts the sum in the same pass.
    grouped = functools.reduce(jnp.add, (out.grouped_jwncc[part] for part in range(parts)))
    return MixGradients(
        *out[:5], out.depthwise_iwnc.sum(0), out.depthwise_bias_jnc.sum(0), grouped,
        out.grouped_bias_jnc.sum(0), out.temperature_ik.sum(0), out.start_ix.sum(0),
    )  # fmt: skip


def _reach(x: Any) -> int:
    """Rows that both convolutions together go back."""
    return x.depthwise_wnc.shape[0] + x.grouped_wncc.shape[0] - 2


def _kernel(*refs: Any, sizes: tuple[int, int], summed: tuple[int, int, int], tiles: int) -> None:
    count = len(MixArrays._fields)
    given = _Given(MixArrays(*refs[:count]), *refs[count : count + 3])
    out: Any = _Out(*refs[count + 3 :])
    b, n, num_kv = given.x.u_bsnc.shape[0], given.x.u_bsnc.shape[2], given.k_bskc.shape[2]
    own, part = pl.program_id(0), pl.program_id(1)
    # Sums first: theirs are the long programs.
    sums = n * pl.cdiv(given.x.grouped_wncc.shape[0], summed[-1])
    head, first = jax.lax.rem(own, n), jax.lax.div(own, n) * summed[-1]
    number = own - sums + part * (pl.num_programs(0) - sums)

    @pl.when((own < sums) & (head < n - num_kv))
    def _() -> None:
        _sum_grouped(given, out, given.query(head), first, part, *summed)

    @pl.when((own < sums) & (head >= n - num_kv))
    def _() -> None:
        _sum_grouped(given, out, given.key(head - (n - num_kv)), first, part, *summed)

    @pl.when((own >= sums) & (number < b * tiles * num_kv))
    def _() -> None:
        group, part = jax.lax.rem(number, num_kv), jax.lax.div(number, num_kv)
        _finish_tile(given, out, group, part, *sizes, tiles=tiles)


def _finish_tile(given: _Given, out: Any, group: jax.Array, part: jax.Array, tokens: int, depth: int, *,
                 tiles: int) -> None:  # fmt: skip
    """Gradients of u, of its halo, of both halves of the value, and, summed over the tile, of small parameters."""
    x = given.x
    s, n, c = x.u_bsnc.shape[1:]
    num_kv, reach = given.k_bskc.shape[2], _reach(x)
    served = (n - num_kv) // num_kv
    batch, channels = jax.lax.div(part, tiles), span(0, c)
    row = span(0, tokens)
    time = jax.lax.rem(part, tiles) * (tokens - reach) - x.halo_segments_bw.shape[1] + row
    finished = row < tokens - reach
    segment = segments_at(x, batch, time)

    def later(value: jax.Array, rows: jax.Array) -> jax.Array:
        """The value so many rows later where the document is the same, else zero."""
        match = (row[None, :] == row[:, None] + rows) & (segment[None, :] == segment[:, None])
        return product(match.astype(value.dtype), value).astype(value.dtype)

    def back(head: Head) -> tuple[jax.Array, jax.Array]:
        return head_gradient(x, head, batch, time, depth)

    def through_grouped(head: jax.Array, convolved: jax.Array) -> jax.Array:
        """Gradient of the depthwise intermediate."""
        taps, chunks = x.grouped_wncc.shape[0], c // depth

        def step(i: jax.Array, y: jax.Array) -> jax.Array:
            tap, number = jax.lax.div(i, chunks), jax.lax.rem(i, chunks)
            kernel = triton.load(
                x.grouped_wncc.at[tap, head, channels[:, None], (number * depth + span(0, depth))[None, :]]
            )
            some = channels_of(convolved, number, depth)
            return y + product(later(some, taps - 1 - tap), kernel, (1, 1))

        y = jax.lax.fori_loop(0, taps * chunks, step, jnp.zeros((tokens, c), jnp.float32))
        return y.astype(x.u_bsnc.dtype)

    def finish(head: jax.Array, convolved: jax.Array, others: jax.Array) -> None:
        """`others`: of the head's key or of its queries, as much of it as the mean gives to each."""
        y, taps = through_grouped(head, convolved), x.depthwise_wnc.shape[0]

        def step(tap: jax.Array, total: jax.Array) -> jax.Array:
            away = taps - 1 - tap
            same = (segments_at(x, batch, time - away) == segment) & finished
            gradient = rows_at(x, batch, time - away, head, channels) * y.astype(jnp.float32)
            gradient = jnp.where(same[:, None], gradient, 0.0)
            triton.store(out.depthwise_iwnc.at[part, tap, head, channels], jnp.sum(gradient, axis=0))
            weight = triton.load(x.depthwise_wnc.at[tap, head, channels]).astype(jnp.float32)
            return total + later(y, away).astype(jnp.float32) * weight[None, :]

        total = jax.lax.fori_loop(0, taps, step, 0.5 * (convolved.astype(jnp.float32) + others))
        total = total.astype(x.u_bsnc.dtype)
        at = head, channels[None, :]
        _store(out.u_bsnc, (batch, time[:, None], *at), total, inside_of(time, s, c) & finished[:, None])
        rows = out.halo_u_bwnc.shape[1]
        _store(out.halo_u_bwnc, (batch, time[:, None] + rows, *at), total,
               inside_of(time + rows, rows, c) & finished[:, None])  # fmt: skip

    key, along = back(given.key(group))
    triton.store(out.temperature_ik.at[part, group], jnp.sum(jnp.where(finished, along, 0.0)))

    def query(i: jax.Array, total: jax.Array) -> jax.Array:
        head = group * served + i
        convolved, _ = back(given.query(head))
        finish(head, convolved, key.astype(jnp.float32) * (1 / served))
        return total + convolved.astype(jnp.float32)

    total = jax.lax.fori_loop(0, served, query, jnp.zeros((tokens, c), jnp.float32))
    finish(n - num_kv + group, key, total)
    _shift_back(given, out, batch, time, finished, group, part)


def _shift_back(given: _Given, out: Any, batch: jax.Array, time: jax.Array, finished: jax.Array, group: jax.Array,
                part: jax.Array) -> None:  # fmt: skip
    """Gradients of both halves of the value, and of what stands at the start of a document."""
    x, v_ref = given.x, given.v_bskc
    s, half = x.current_bsx.shape[1:]
    c = v_ref.shape[3]
    at = group * c + span(0, c)
    late = at >= half
    inside = inside_of(time, s, c) & finished[:, None]
    value = triton.load(v_ref.at[batch, time[:, None], group, span(0, c)[None, :]], mask=inside, other=0.0)
    _store(out.current_bsx, (batch, time[:, None], at[None, :]), value, inside & ~late[None, :])

    used = inside_of(time + 1, s, c) & finished[:, None] & late[None, :]
    after = triton.load(v_ref.at[batch, time[:, None] + 1, group, span(0, c)[None, :]], mask=used, other=0.0)
    same = segments_at(x, batch, time) == segments_at(x, batch, time + 1)
    delayed = jnp.where(same[:, None], after, jnp.zeros_like(after))
    column = jnp.where(late, at - half, at + half)  # never negative, for the reason that `_store` gives
    _store(out.delayed_bsx, (batch, time[:, None], column[None, :]), delayed, inside & late[None, :])
    _store(out.halo_delayed_b1x, (batch, time[:, None] + 1, column[None, :]), delayed,
           inside_of(time + 1, 1, c) & finished[:, None] & late[None, :])  # fmt: skip
    start = jnp.sum(jnp.where(same[:, None], jnp.zeros_like(after), after).astype(jnp.float32), axis=0)
    triton.store(out.start_ix.at[part, column], start, mask=late)


def _store(ref: Any, at: tuple[jax.Array, ...], value: jax.Array, mask: jax.Array) -> None:
    # What is masked goes to a row beyond the last: interpreted, a negative index would count from the end.
    batch, row, *rest = at
    triton.store(ref.at[(batch, jnp.where(row < 0, ref.shape[1], row), *rest)], value, mask=mask)


def _sum_grouped(given: _Given, out: Any, head: Head, first: jax.Array, part: jax.Array, tokens: int, depth: int,
                 count: int) -> None:  # fmt: skip
    """Gradients of some taps of the grouped convolution of a head and of both biases, over a part of the tokens."""
    x = given.x
    b, s, _, c = x.u_bsnc.shape
    last, channels = x.grouped_wncc.shape[0] - 1, span(0, c)
    taps = [jnp.minimum(first + i, last) for i in range(count)]  # the last one twice where they do not divide
    in_row = pl.cdiv(s, tokens)
    each = pl.cdiv(b * in_row, out.grouped_jwncc.shape[0])

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        batch = jax.lax.div(i, in_row)
        time = jax.lax.rem(i, in_row) * tokens + span(0, tokens)
        z, _ = head_gradient(x, head, batch, time, depth, unroll=depth == c)
        rows = (tap_row(x, batch, time, head.number, channels, last - tap) for tap in taps)
        grouped = (total + product(row, z, (0, 0)) for total, row in zip(sums[:-1], rows, strict=True))
        return *grouped, sums[-1] + jnp.sum(z.astype(jnp.float32), axis=0)

    zeros = *(jnp.zeros((c, c), jnp.float32) for _ in taps), jnp.zeros((c,), jnp.float32)
    *grouped, bias = jax.lax.fori_loop(part * each, jnp.minimum((part + 1) * each, b * in_row), step, zeros)
    for tap, total in zip(taps, grouped, strict=True):
        triton.store(out.grouped_jwncc.at[part, tap, head.number, channels[:, None], channels[None, :]], total)
    triton.store(out.grouped_bias_jnc.at[part, head.number, channels], bias)
    # A bias of the depthwise convolution reaches every token by all taps, whatever the limits of documents.
    through = jnp.zeros((c,), jnp.float32)
    for tap in range(last + 1):
        kernel = triton.load(x.grouped_wncc.at[tap, head.number, channels[:, None], channels[None, :]])
        through += jnp.sum(kernel.astype(jnp.float32) * bias[None, :], axis=1)
    triton.store(out.depthwise_bias_jnc.at[part, head.number, channels], through)
