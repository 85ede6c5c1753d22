"""Gradients of the CCA mix by three kernels, the forward's intermediates computed again from the projections.

The first goes back from queries, keys and values to what the convolutions made, a tile of tokens of one key head and
the query heads that it serves to a program. The second goes on to the projections, which need the rows that follow a
tile's, so that those must have been written; the third sums the gradient of the grouped convolution over tokens.
Rows before the piece are rows like others: time starts at minus their number.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.cca_mix import MixArrays, filled, product, rows_at, segments_at, span, tap_row
from pallas_kernels.launch import launch
from pallas_kernels.tiles import tile

# One fp32 part of the grouped gradient is written for so many tokens, but no more parts than that in all: at the sizes
# of the 8B a part is 1.3 MB, u of these tokens 2.6 MB.
TOKENS_OF_PART = 1024
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


class _Heads(NamedTuple):
    """What the first kernel writes; i counts tiles of tokens in all rows of the batch."""

    convolved_bsnc: jax.Array
    current_bsx: jax.Array
    delayed_bsx: jax.Array
    halo_delayed_b1x: jax.Array
    grouped_bias_inc: jax.Array
    temperature_ik: jax.Array
    start_ix: jax.Array


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
    heads = _Heads(*_heads(x, q_bshc, k_bskc, v_bskc, platform))
    u, halo_u, depthwise = _projections(x, heads.convolved_bsnc, platform)
    grouped = _grouped(x, heads.convolved_bsnc, platform)
    bias = heads.grouped_bias_inc.sum(0)
    # A bias of the depthwise convolution reaches every token by all taps, whatever the limits of documents.
    kernel = x.grouped_wncc.astype(jnp.float32)
    depthwise_bias = jnp.einsum("wnxc,nc->nx", kernel, bias, precision=jax.lax.Precision.HIGHEST)
    return MixGradients(
        u, heads.current_bsx, heads.delayed_bsx, halo_u, heads.halo_delayed_b1x, depthwise.sum(0), depthwise_bias,
        grouped, bias, heads.temperature_ik.sum(0), heads.start_ix.sum(0),
    )  # fmt: skip


def _parts(like: jax.Array, count: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count, *like.shape), jnp.float32)


def _heads(x: MixArrays, q_bshc: jax.Array, k_bskc: jax.Array, v_bskc: jax.Array, platform: str) -> list[jax.Array]:
    b, s, _, c = x.u_bsnc.shape
    (tokens, depth), warps, stages = tile("cca_mix_backward", platform, x.u_bsnc.dtype)
    tiles = pl.cdiv(s + x.halo_segments_bw.shape[1], tokens)
    like = x.u_bsnc, x.current_bsx, x.delayed_bsx, x.halo_delayed_b1x
    return launch(
        functools.partial(_heads_kernel, tokens=tokens, depth=min(depth, c)),
        *x, q_bshc, k_bskc, v_bskc,
        name="cca_mix_backward",
        grid=(k_bskc.shape[2], tiles, b),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in like]
        + [_parts(a, b * tiles) for a in (x.grouped_bias_nc, x.temperature_k, x.start_x)],
        warps=warps,
        stages=stages,
        platform=platform,
    )  # fmt: skip


def _heads_kernel(*refs: Any, tokens: int, depth: int) -> None:
    count = len(MixArrays._fields)
    x: Any = MixArrays(*refs[:count])
    out: Any = _Heads(*refs[count + 3 :])
    q_ref, k_ref, v_ref = refs[count : count + 3]
    s, n, c = x.u_bsnc.shape[1:]
    num_kv = x.temperature_k.shape[0]
    group, batch = pl.program_id(0), pl.program_id(2)
    served, key_head = (n - num_kv) // num_kv, n - num_kv + group
    part = batch * pl.num_programs(1) + pl.program_id(1)
    channels = span(0, c)
    time = pl.program_id(1) * tokens - x.halo_segments_bw.shape[1] + span(0, tokens)

    def at(head: jax.Array) -> jax.Array:
        return rows_at(x, batch, time, head, channels)

    def finish(head: jax.Array, mixed: jax.Array, ref: Any, own: jax.Array, scale: jax.Array | float) -> jax.Array:
        """Write the gradient of what the convolutions make of `head`; return that of the temperature of each token."""
        g = _turned_back(x, ref, batch, time, own)
        inverse = jax.lax.rsqrt(jnp.sum(mixed * mixed, axis=1) + 1e-12)
        along = jnp.sum(mixed * g, axis=1)
        gradient = (g - mixed * (along * inverse * inverse)[:, None]) * (inverse * (c**0.5 * scale))[:, None]
        convolved = gradient.astype(x.u_bsnc.dtype)
        _store(out.convolved_bsnc, (batch, time[:, None], head, channels[None, :]), convolved, _inside(time, s, c))
        triton.store(out.grouped_bias_inc.at[part, head, channels], jnp.sum(convolved.astype(jnp.float32), axis=0))
        return along * inverse * c**0.5

    def query(i: jax.Array, total: jax.Array) -> jax.Array:
        head = group * served + i
        mixed = _mixed(x, batch, time, head, depth)
        own = at(head)  # loaded after the product, from cache: registers would not hold it
        finish(head, mixed + 0.5 * (own + at(key_head)), q_ref, head, 1.0)
        return total + own

    total = jax.lax.fori_loop(0, served, query, jnp.zeros((tokens, c), jnp.float32))
    mixed = _mixed(x, batch, time, key_head, depth) + 0.5 * (total * (1 / served) + at(key_head))
    along = finish(key_head, mixed, k_ref, group, x.temperature_k[group].astype(jnp.float32))
    triton.store(out.temperature_ik.at[part, group], jnp.sum(along))
    _shift_back(x, v_ref, out, batch, time, group, part)


def _mixed(x: Any, batch: jax.Array, time: jax.Array, head: jax.Array, depth: int) -> jax.Array:
    """Both convolutions of a head, [tokens, c] fp32, rounded as in the forward pass."""
    dtype, c = x.u_bsnc.dtype, x.u_bsnc.shape[3]
    taps, chunks, out = x.grouped_wncc.shape[0], c // depth, span(0, c)

    def step(i: jax.Array, z: jax.Array) -> jax.Array:
        tap, channels = jax.lax.div(i, chunks), jax.lax.rem(i, chunks) * depth + span(0, depth)
        row = tap_row(x, batch, time, head, channels, taps - 1 - tap)
        return z + product(row, triton.load(x.grouped_wncc.at[tap, head, channels[:, None], out[None, :]]))

    z = jax.lax.fori_loop(0, taps * chunks, step, jnp.zeros((time.size, c), jnp.float32))
    bias = triton.load(x.grouped_bias_nc.at[head, out]).astype(dtype)
    return (z.astype(dtype) + bias[None, :]).astype(jnp.float32)


def _turned_back(x: Any, ref: Any, batch: jax.Array, time: jax.Array, head: jax.Array) -> jax.Array:
    """Gradient of a head before the rotation, [tokens, c] fp32, zero outside of the piece.

    The other channel of each pair is a second load, since registers cannot be permuted.
    """
    s, c, pairs = ref.shape[1], ref.shape[3], x.cos_bsp.shape[2]
    inside, channel = _inside(time, s, c), span(0, c)
    first, second = channel < pairs, (channel >= pairs) & (channel < 2 * pairs)

    def load(source: Any, shift: int, among: jax.Array, *heads: jax.Array) -> jax.Array:
        at = source.at[(batch, time[:, None], *heads, channel[None, :] + shift)]
        return triton.load(at, mask=inside & among[None, :], other=0.0).astype(jnp.float32)

    def both(table: Any) -> jax.Array:
        return load(table, 0, first) + load(table, -pairs, second)

    g = load(ref, 0, channel >= 0, head)
    other = load(ref, pairs, first, head) - load(ref, -pairs, second, head)
    return g * (both(x.cos_bsp) + jnp.where(channel >= 2 * pairs, 1.0, 0.0)[None, :]) + other * both(x.sin_bsp)


def _shift_back(x: Any, v_ref: Any, out: Any, batch: jax.Array, time: jax.Array, group: jax.Array,
                part: jax.Array) -> None:  # fmt: skip
    """Gradients of both halves of the value, and of what stands at the start of a document."""
    s, half = x.current_bsx.shape[1:]
    c = v_ref.shape[3]
    at = group * c + span(0, c)
    late = at >= half
    inside = _inside(time, s, c)
    value = triton.load(v_ref.at[batch, time[:, None], group, span(0, c)[None, :]], mask=inside, other=0.0)
    _store(out.current_bsx, (batch, time[:, None], at[None, :]), value, inside & ~late[None, :])

    used = _inside(time + 1, s, c) & late[None, :]
    after = triton.load(v_ref.at[batch, time[:, None] + 1, group, span(0, c)[None, :]], mask=used, other=0.0)
    same = segments_at(x, batch, time) == segments_at(x, batch, time + 1)
    delayed = jnp.where(same[:, None], after, jnp.zeros_like(after))
    column = jnp.where(late, at - half, at + half)  # never negative, for the reason that `_store` gives
    _store(out.delayed_bsx, (batch, time[:, None], column[None, :]), delayed, inside & late[None, :])
    _store(out.halo_delayed_b1x, (batch, time[:, None] + 1, column[None, :]), delayed,
           _inside(time + 1, 1, c) & late[None, :])  # fmt: skip
    start = jnp.sum(jnp.where(same[:, None], jnp.zeros_like(after), after).astype(jnp.float32), axis=0)
    triton.store(out.start_ix.at[part, column], start, mask=late)


def _inside(time: jax.Array, length: int, c: int) -> jax.Array:
    return filled(((time >= 0) & (time < length))[:, None], time.size, c)


def _store(ref: Any, at: tuple[jax.Array, ...], value: jax.Array, mask: jax.Array) -> None:
    # What is masked goes to a row beyond the last: interpreted, a negative index would count from the end.
    batch, row, *rest = at
    triton.store(ref.at[(batch, jnp.where(row < 0, ref.shape[1], row), *rest)], value, mask=mask)


def _projections(x: MixArrays, convolved_bsnc: jax.Array, platform: str) -> list[jax.Array]:
    """Gradients of u, of its halo and, a tile of tokens each, of the depthwise taps, from that of what is convolved."""
    b, s, n, c = x.u_bsnc.shape
    (tokens, depth), warps, stages = tile("cca_mix_backward_projections", platform, x.u_bsnc.dtype)
    tiles = pl.cdiv(s + x.halo_segments_bw.shape[1], tokens)
    return launch(
        functools.partial(_projections_kernel, tokens=tokens, depth=min(depth, c)),
        *x, convolved_bsnc,
        name="cca_mix_backward_projections",
        grid=(n, tiles, b),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (x.u_bsnc, x.halo_u_bwnc)]
        + [_parts(x.depthwise_wnc, b * tiles)],
        warps=warps,
        stages=stages,
        platform=platform,
    )  # fmt: skip


def _projections_kernel(*refs: Any, tokens: int, depth: int) -> None:
    count = len(MixArrays._fields)
    x: Any = MixArrays(*refs[:count])
    z_ref, u_ref, halo_ref, depthwise_ref = refs[count:]
    s, n, c = x.u_bsnc.shape[1:]
    num_kv = x.temperature_k.shape[0]
    taps0, taps1 = x.depthwise_wnc.shape[0], x.grouped_wncc.shape[0]
    head, batch = pl.program_id(0), pl.program_id(2)
    part = batch * pl.num_programs(1) + pl.program_id(1)
    channels, chunks = span(0, c), c // depth
    time = pl.program_id(1) * tokens - x.halo_segments_bw.shape[1] + span(0, tokens)

    def convolved(time: jax.Array, head: jax.Array, channels: jax.Array) -> jax.Array:
        at = z_ref.at[batch, time[:, None], head, channels[None, :]]
        return triton.load(at, mask=_inside(time, s, channels.size), other=0.0)

    def step(i: jax.Array, ys: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        ahead, some = jax.lax.div(i, chunks), jax.lax.rem(i, chunks) * depth + span(0, depth)
        kernel = triton.load(x.grouped_wncc.at[taps1 - 1 - ahead, head, channels[:, None], some[None, :]])
        out = []
        for after, y in enumerate(ys):
            here = time + after
            same = segments_at(x, batch, here) == segments_at(x, batch, here + ahead)
            z = convolved(here + ahead, head, some)
            out.append(y + product(jnp.where(same[:, None], z, jnp.zeros_like(z)), kernel, (1, 1)))
        return tuple(out)

    # The gradient of the depthwise intermediate, of this row and those that follow within the taps' reach.
    zero = tuple(jnp.zeros((tokens, c), jnp.float32) for _ in range(taps0))
    ys = jax.lax.fori_loop(0, taps1 * chunks, step, zero)
    ys = [y.astype(x.u_bsnc.dtype).astype(jnp.float32) for y in ys]

    # Past the convolutions: half of what is the head's own, and of the mean with its key or with its queries.
    served = (n - num_kv) // num_kv
    is_key = (head >= n - num_kv).astype(jnp.int32)
    first = is_key * (head - (n - num_kv)) * served + (1 - is_key) * (n - num_kv + jax.lax.div(head, served))
    number = 1 + is_key * (served - 1)
    others = jax.lax.fori_loop(
        first, first + number, lambda i, total: total + convolved(time, i, channels).astype(jnp.float32), zero[0]
    )
    total = 0.5 * (convolved(time, head, channels).astype(jnp.float32) + others * (number.astype(jnp.float32) / served))

    segment = segments_at(x, batch, time)
    for tap in range(taps0):
        away = taps0 - 1 - tap
        weight = triton.load(x.depthwise_wnc.at[tap, head, channels]).astype(jnp.float32)
        same = (segments_at(x, batch, time + away) == segment)[:, None]
        total += jnp.where(same, ys[away], 0.0) * weight[None, :]
        same = (segments_at(x, batch, time - away) == segment)[:, None]
        gradient = jnp.where(same, rows_at(x, batch, time - away, head, channels) * ys[0], 0.0)
        triton.store(depthwise_ref.at[part, tap, head, channels], jnp.sum(gradient, axis=0))
    total = total.astype(u_ref.dtype)
    _store(u_ref, (batch, time[:, None], head, channels[None, :]), total, _inside(time, s, c))
    rows = halo_ref.shape[1]
    _store(halo_ref, (batch, time[:, None] + rows, head, channels[None, :]), total, _inside(time + rows, rows, c))


def _grouped(x: MixArrays, convolved_bsnc: jax.Array, platform: str) -> jax.Array:
    """Gradient of the grouped convolution, fp32 [k1, n, c, c], from that of its result."""
    b, s, n, c = x.u_bsnc.shape
    taps = x.grouped_wncc.shape[0]
    (tokens, width), warps, stages = tile("cca_mix_backward_grouped", platform, x.u_bsnc.dtype)
    width = min(width, c)
    parts = max(1, min(MOST_PARTS, b * s // TOKENS_OF_PART))
    out_iwncc = launch(
        functools.partial(_grouped_kernel, tokens=tokens, width=width),
        *x, convolved_bsnc,
        name="cca_mix_backward_grouped",
        grid=(n * taps, c // width, parts),
        out_shape=jax.ShapeDtypeStruct((parts, taps, n, c, c), jnp.float32),
        warps=warps,
        stages=stages,
        platform=platform,
    )  # fmt: skip
    return out_iwncc.sum(0)


def _grouped_kernel(*refs: Any, tokens: int, width: int) -> None:
    count = len(MixArrays._fields)
    x: Any = MixArrays(*refs[:count])
    convolved_ref, out_ref = refs[count:]
    b, s, _, c = x.u_bsnc.shape
    taps = x.grouped_wncc.shape[0]
    head, tap = jax.lax.div(pl.program_id(0), taps), jax.lax.rem(pl.program_id(0), taps)
    channels, columns = span(0, c), pl.program_id(1) * width + span(0, width)
    in_row = pl.cdiv(s, tokens)
    each = pl.cdiv(b * in_row, out_ref.shape[0])
    first = pl.program_id(2) * each

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        batch = jax.lax.div(i, in_row)
        time = jax.lax.rem(i, in_row) * tokens + span(0, tokens)
        row = tap_row(x, batch, time, head, channels, taps - 1 - tap)
        z = triton.load(convolved_ref.at[batch, time[:, None], head, columns[None, :]],
                        mask=_inside(time, s, width), other=0.0)  # fmt: skip
        return total + product(row, z, (0, 0))

    last = jnp.minimum(first + each, b * in_row)
    total = jax.lax.fori_loop(first, last, step, jnp.zeros((c, width), jnp.float32))
    triton.store(out_ref.at[pl.program_id(2), tap, head, channels[:, None], columns[None, :]], total)
