"""Attention of a few queries to many keys: programs share the keys, and a second kernel combines their results.

All queries of the heads that share a key head are the rows of one tile, so that each key is read once. Cache entries
after the last query or before the window are not read (like Flash-Decoding, vLLM and Lean Attention).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention import attend, finish, nothing
from pallas_kernels.attention_tiles import AttentionInputs, Refs, Static, key_head, load_rows, rows_of, tile_of
from pallas_kernels.launch import Out, launch, load, store
from pallas_kernels.tiles import Architecture, tile

ROWS = 64  # maximum rows (query heads of a key head × queries) for this kernel
LEAST_ROWS = 16  # minimum rows of a matmul
MOST_PARTS = 128  # maximum parts that one program combines


def decodes(x: AttentionInputs) -> bool:
    """Return whether there are so few queries that splitting the keys is faster."""
    return x.q_bshc.shape[1] * x.q_bshc.shape[2] // x.k_btkc.shape[2] <= ROWS


def attention_decode(
    x: AttentionInputs, *, dtype: jax.typing.DTypeLike, architecture: Architecture
) -> tuple[jax.Array, jax.Array]:
    """Compute the same as `attention_forward`, for queries for which `decodes` is true."""
    (b, s, h, c), (_, t, num_kv, _) = x.q_bshc.shape, x.k_btkc.shape
    sizes = tile_of("decode", architecture, x.q_bshc)
    rows = max(LEAST_ROWS, pl.next_power_of_2(s * h // num_kv))
    keys, programs = sizes.sizes[0], tile("decode", architecture, x.q_bshc.dtype).sizes[1]
    most = min(programs // (b * num_kv), pl.cdiv(t, 2 * keys), MOST_PARTS)
    parts = 1 << (max(most, 1).bit_length() - 1)
    offset_b = jnp.broadcast_to(x.query_offset, (b,))
    kernel, arrays = functools.partial(_kernel, static=Static(rows, keys, x.window)), (offset_b, Refs.of(x))
    out = Out((b, s, h, parts * c), jnp.float32), Out((b, s, h, parts), jnp.float32)
    o_parts, lse_parts = launch("attention_decode", kernel, arrays, out, (parts, b * num_kv), sizes, architecture)
    kernel, arrays = functools.partial(_join_kernel, parts=parts, c=c), (o_parts.reshape(-1, c), lse_parts.reshape(-1))
    out, grid = (Out((b * s * h, c), dtype), Out((b * s * h,), jnp.float32)), (b * s * h,)
    o, lse = launch("attention_join", kernel, arrays, out, grid, sizes._replace(stages=1), architecture)
    return o.reshape(b, s, h, c), lse.reshape(b, s, h)


def _kernel(offset_ref: Any, x: Refs, o_ref: Any, lse_ref: Any, *, static: Static) -> None:
    (_, s, _, c), t, keys, window = x.q.shape, x.k.shape[1], static.keys, static.window
    part, parts = pl.program_id(0), pl.num_programs(0)
    head = key_head(x, 1)
    offset = offset_ref[head[0]]
    rows = rows_of(x, head, 0, static.rows, offset)

    # Split what is visible now, which may be a small part of the cache.
    high = (jnp.clip(offset + s, 0, t) + keys - 1) // keys
    low = 0 if window is None else jnp.clip(offset - window + 1, 0, t) // keys
    each = (jnp.maximum(high - low, 0) + parts - 1) // parts
    first = low + part * each
    last = jnp.minimum(first + each, high)

    step = functools.partial(attend, x, rows, load_rows(x.q, rows), static)
    state = nothing(static.rows, c)
    state = jax.lax.fori_loop(first, last, lambda i, state: step(i, state, True), state)
    o, lse = finish(state)
    channels = part * c + jnp.arange(c, dtype=jnp.int32)[None, :]
    at = (head[0], rows.query[:, None], rows.query_head[:, None], channels)
    store(o_ref.at[at], o, mask=rows.inside[:, None] & (channels >= 0))
    store(lse_ref.at[head[0], rows.query, rows.query_head, part], lse, mask=rows.inside)


def _join_kernel(o_parts_ref: Any, lse_parts_ref: Any, o_ref: Any, lse_ref: Any, *, parts: int, c: int) -> None:
    row = pl.program_id(0)
    part = row * parts + jnp.arange(parts, dtype=jnp.int32)
    channels = jnp.arange(c, dtype=jnp.int32)
    lse = load(lse_parts_ref.at[part])
    top = lse.max(0)
    weight = jnp.exp(lse - top)
    total = weight.sum(0)
    o = load(o_parts_ref.at[part[:, None], channels[None, :]])
    store(o_ref.at[row, channels], ((o * weight[:, None]).sum(0) / total).astype(o_ref.dtype))
    store(lse_ref.at[row], top + jnp.log(total))
