"""The mixing step of CCA in one kernel: from packed projections to the queries, keys and values of attention.

A program processes a tile of tokens for one key head and its query heads, one after the other, since the QK-mean
couples them. Projections are read from memory once; the taps read rows before the tile again, from cache.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.launch import Out, launch, load, store
from pallas_kernels.product import product
from pallas_kernels.tiles import Architecture, tile


class MixArrays(NamedTuple):
    """Inputs of the mix; n = h + k heads, x = k·c / 2, p pairs of rotated channels.

    `packed_bsmc` has the n heads, queries before keys, then k heads of which the first half of all channels is this
    token's value and the second half the next token's.
    `halo_u_bwnc` and `halo_segments_bw` hold the max(k0 + k1 − 2, 1) rows before the first token; without a halo, its
    three arrays are None, and nothing is before the first token. `grouped_wncc` has the dtype of `packed_bsmc`, other
    weights any floating dtype; cos and sin are fp32, segments int32. `start_x` is the delayed value at the start of a
    document; None for zero.
    """

    packed_bsmc: jax.Array
    halo_u_bwnc: jax.Array | None
    halo_delayed_b1x: jax.Array | None
    halo_segments_bw: jax.Array | None
    segments_bs: jax.Array
    cos_bsp: jax.Array
    sin_bsp: jax.Array
    depthwise_wnc: jax.Array
    depthwise_bias_nc: jax.Array
    grouped_wncc: jax.Array
    grouped_bias_nc: jax.Array
    temperature_k: jax.Array
    start_x: jax.Array | None


class Sizes(NamedTuple):
    """Sizes of the mix; `heads` includes those of keys, `half` is half of the value's channels, `halo` its rows."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    channels: int
    half: int
    halo: int


def sizes_of(x: Any) -> Sizes:
    """Return the sizes of `MixArrays`, or of references to them."""
    b, s, heads, c = x.packed_bsmc.shape
    num_kv = x.temperature_k.shape[0]
    before = 0 if x.halo_segments_bw is None else x.halo_segments_bw.shape[1]
    return Sizes(b, s, heads - num_kv, num_kv, c, num_kv * c // 2, before)


def cca_mix(x: MixArrays, *, architecture: Architecture) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Apply convolutions, QK-mean, QK-norm, temperature, partial RoPE and value shift (docs/reference.md §1.3).

    c, p and c − 2p are powers of two, and the last may be 0. Returns q [b, s, h, c], k and v [b, s, k, c] in the dtype
    of `packed_bsmc`; and the inverse norm of each head of queries and keys before QK-norm, fp32 [b, n, s], from which
    `cca_mix_backward` computes the gradients.
    """
    return launch_mix("cca_mix", _kernel, x, x.temperature_k.shape[0], architecture)


def launch_mix(name: str, kernel: Callable[..., None], x: MixArrays, programs: int, architecture: Architecture) -> Any:
    """Launch a kernel that computes `cca_mix`, with a number of programs for each tile of tokens."""
    (b, s, n, num_kv, c, *_), dtype = sizes_of(x), x.packed_bsmc.dtype
    cut = tile(name, architecture, dtype)
    tokens, depth = cut.sizes
    out = *(Out((b, s, heads, c), dtype) for heads in (n - num_kv, num_kv, num_kv)), Out((b, n, s), jnp.float32)
    kernel = functools.partial(kernel, tokens=tokens, depth=min(depth, c))
    return launch(name, kernel, (x,), out, (programs, pl.cdiv(s, tokens), b), cut, architecture)


def _kernel(x: Any, q_ref: Any, k_ref: Any, v_ref: Any, inverse_ref: Any, *, tokens: int, depth: int) -> None:
    _, s, n, num_kv, c, *_ = sizes_of(x)
    group, batch = pl.program_id(0), pl.program_id(2)
    served = (n - num_kv) // num_kv
    time = pl.program_id(1) * tokens + span(0, tokens)
    inside, columns = time < s, rotary_columns(c, x.cos_bsp.shape[2])
    key_head = n - num_kv + group

    def own(head: jax.Array) -> list[jax.Array]:
        return [rows_at(x, batch, time, head, column) for column in columns]

    def finish(parts: list[jax.Array], head: jax.Array, scale: jax.Array | float, ref: Any, number: jax.Array) -> None:
        inverse = jax.lax.rsqrt(sum(jnp.sum(part * part, axis=1) for part in parts) + 1e-12)
        store(inverse_ref.at[batch, head, time], inverse, mask=inside)
        tables = rotary_rows((x.cos_bsp, x.sin_bsp), batch, time, inside)
        parts = rotated([part * (inverse * (c**0.5 * scale))[:, None] for part in parts], *tables)
        for part, column in zip(parts, columns, strict=True):
            store_rows(ref, batch, time, number, column, part, inside)

    def query(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        head = group * served + i
        mixed = convolved(x, batch, time, head, columns, depth)
        # Loaded from cache after the matmul, for each head again, since registers cannot hold them.
        queries, keys = own(head), own(key_head)
        finish([z + 0.5 * (q + k) for z, q, k in zip(mixed, queries, keys, strict=True)], head, 1.0, q_ref, head)
        return tuple(total + q for total, q in zip(sums, queries, strict=True))

    zero = tuple(jnp.zeros((tokens, column.size), jnp.float32) for column in columns)
    sums = jax.lax.fori_loop(0, served, query, zero)
    mixed = convolved(x, batch, time, key_head, columns, depth)
    mean = [0.5 * (q * (1 / served) + k) for q, k in zip(sums, own(key_head), strict=True)]
    scale = temperature(x.temperature_k, group)
    finish([z + m for z, m in zip(mixed, mean, strict=True)], key_head, scale, k_ref, group)
    shift_value(x, v_ref, batch, time, group)


def store_rows(ref: Any, batch: Any, time: jax.Array, head: Any, column: jax.Array, value: Any, inside: Any) -> None:
    """Store some channels of a head, [tokens, channels], at `time`, where `inside` [tokens] is true."""
    at, value = ref.at[batch, time[:, None], head, column[None, :]], value.astype(ref.dtype)
    store(at, value, mask=filled(inside[:, None], *value.shape))


def convolved(
    x: Any, batch: jax.Array, time: jax.Array, head: jax.Array, columns: Sequence[jax.Array], depth: int
) -> list[jax.Array]:
    """Compute both convolutions of a head, for each range of output channels; fp32, rounded like the reference."""

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        tap, channels = jax.lax.div(i, chunks), jax.lax.rem(i, chunks) * depth + span(0, depth)
        row = tap_row(x, batch, time, head, channels, taps - 1 - tap)
        kernels = [load(x.grouped_wncc.at[tap, head, channels[:, None], column[None, :]]) for column in columns]
        return tuple(z + product(row, kernel) for z, kernel in zip(sums, kernels, strict=True))

    dtype = x.packed_bsmc.dtype
    taps, chunks = x.grouped_wncc.shape[0], x.grouped_wncc.shape[2] // depth
    zero = tuple(jnp.zeros((time.size, column.size), jnp.float32) for column in columns)
    sums = jax.lax.fori_loop(0, taps * chunks, step, zero)
    biases = [load(x.grouped_bias_nc.at[head, column]).astype(dtype) for column in columns]
    return [(z.astype(dtype) + bias[None, :]).astype(jnp.float32) for z, bias in zip(sums, biases, strict=True)]


def shift_value(x: Any, v_ref: Any, batch: jax.Array, time: jax.Array, group: jax.Array) -> None:
    """Store the values of a key head, see `shifted_value`."""
    channel = span(0, x.packed_bsmc.shape[3])
    mask = filled((time < x.packed_bsmc.shape[1])[:, None], time.size, channel.size)
    store(v_ref.at[batch, time[:, None], group, channel[None, :]], shifted_value(x, batch, time, group), mask=mask)


def shifted_value(x: Any, batch: jax.Array, time: jax.Array, group: jax.Array) -> jax.Array:
    """Return the values: this token's in the first half of all channels, the previous token's in the second."""
    sizes = sizes_of(x)
    channel, row = span(0, sizes.channels), row_of(batch)
    at = group * sizes.channels + channel
    late = at >= sizes.half
    inside = filled((time < sizes.tokens)[:, None], time.size, channel.size)
    head = sizes.heads + group
    current = load(x.packed_bsmc.at[row, time[:, None], head, channel[None, :]], mask=inside & ~late[None, :])
    before = load(
        x.packed_bsmc.at[row, time[:, None] - 1, head, channel[None, :]],
        mask=inside & (time >= 1)[:, None] & late[None, :],
    )
    if x.halo_delayed_b1x is not None:
        halo = x.halo_delayed_b1x.at[row, 0, (at - sizes.half)[None, :]]
        halo = load(halo, mask=filled(late[None, :], row.size, channel.size))
        before = jnp.where((time == 0)[:, None], halo, before)
    same = segments_at(x, batch, time - 1) == segments_at(x, batch, time)
    first = 0.0 if x.start_x is None else load(x.start_x.at[at - sizes.half], mask=late)[None, :]
    before = jnp.where(same[:, None], before, first).astype(current.dtype)
    return jnp.where(late[None, :], before, current)


def row_of(batch: jax.Array) -> jax.Array:
    """Return `batch` so that it broadcasts against channels: one index, or int32 [tokens, 1], an index per token."""
    return batch[:, None] if batch.ndim else batch


def tap_row(
    x: Any, batch: jax.Array, time: jax.Array, head: jax.Array, channels: jax.Array, back: jax.Array | int
) -> jax.Array:
    """Compute the depthwise output `back` rows before each token, as it sees it: [tokens, channels] in its dtype.

    `time` are indices of the tokens in the piece, `channels` are some of the head, of which queries are before keys.
    """
    taps, here = x.depthwise_wnc.shape[0], time - back
    segment = segments_at(x, batch, here)
    bias = load(x.depthwise_bias_nc.at[head, channels]).astype(jnp.float32)[None, :]
    y = jnp.broadcast_to(bias, (time.size, channels.size))
    for tap in range(taps):
        earlier = here - (taps - 1 - tap)
        weight = load(x.depthwise_wnc.at[tap, head, channels]).astype(jnp.float32)[None, :]
        same = segments_at(x, batch, earlier) == segment
        y += jnp.where(same[:, None], rows_at(x, batch, earlier, head, channels) * weight, 0.0)
    own = segments_at(x, batch, time) == segment
    return jnp.where(own[:, None], y, bias).astype(x.packed_bsmc.dtype)


def rows_at(x: Any, batch: jax.Array, time: jax.Array, head: jax.Array, channels: jax.Array) -> jax.Array:
    """Load u of a head at `time`, [tokens, channels] fp32, also from the halo; zero elsewhere."""
    s = x.packed_bsmc.shape[1]
    shape, at, channel, row = (time.size, channels.size), time[:, None], channels[None, :], row_of(batch)
    inside = filled((at >= 0) & (at < s), *shape)
    here = load(x.packed_bsmc.at[row, at, head, channel], mask=inside)
    if x.halo_u_bwnc is None:
        # They are 0 already, but without a selection Triton lays out the tile such that registers spill.
        here = jnp.where(filled(at < 0, *shape), 0.0, here)
    else:
        before = x.halo_u_bwnc.shape[1]
        ahead = filled((at < 0) & (at >= -before), *shape)
        here = jnp.where(ahead, load(x.halo_u_bwnc.at[row, at + before, head, channel], mask=ahead), here)
    return here.astype(jnp.float32)


def segments_at(x: Any, batch: jax.Array, time: jax.Array) -> jax.Array:
    """Load the documents of the tokens at `time`, of any shape, also from the halo; 0 elsewhere."""
    here = load(x.segments_bs.at[batch, time], mask=(time >= 0) & (time < x.segments_bs.shape[1]))
    if x.halo_segments_bw is None:
        return here
    before = x.halo_segments_bw.shape[1]
    ahead = (time < 0) & (time >= -before)
    halo = load(x.halo_segments_bw.at[batch, time + before], mask=ahead)
    return jnp.where(ahead, halo, here)


def span(first: int, size: int) -> jax.Array:
    """Return int32 [size]: `first`, `first` + 1 and so on."""
    return first + jax.lax.iota(jnp.int32, size)


def filled(mask: jax.Array, *shape: int) -> jax.Array:
    """Broadcast `mask` to the shape that is loaded or stored."""
    return jnp.broadcast_to(mask, shape)


def rotary_columns(c: int, pairs: int) -> list[jax.Array]:
    """Return the channels of a head in ranges: both of RoPE's pairs, and the rest, if any.

    RoPE needs the first two apart, and registers cannot be sliced.
    """
    starts = (0, pairs, 2 * pairs) if 2 * pairs < c else (0, pairs)
    return [span(first, last - first) for first, last in zip(starts, (*starts[1:], c), strict=True)]


def rotary_rows(
    tables: tuple[Any, Any], batch: jax.Array, time: jax.Array, inside: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Load the rows of the RoPE tables, [tokens, pairs] each; 0 outside."""
    pairs = tables[0].shape[2]
    at, mask = (row_of(batch), time[:, None], span(0, pairs)[None, :]), filled(inside[:, None], time.size, pairs)
    cos, sin = (load(table.at[at], mask=mask) for table in tables)
    return cos, sin


def rotated(parts: list[jax.Array], cos: jax.Array, sin: jax.Array) -> list[jax.Array]:
    """Apply RoPE to ranges of channels (`rotary_columns`); with −sin, its inverse."""
    first, second, *rest = parts
    return [first * cos - second * sin, second * cos + first * sin, *rest]


def temperature(temperature_k: Any, group: jax.Array) -> jax.Array:
    """Load a temperature in fp32. 0 would lose the directions of keys, which the gradient needs: it becomes 1e-20."""
    value = temperature_k[group].astype(jnp.float32)
    return jnp.where(jnp.abs(value) < 1e-20, 1e-20, value)
