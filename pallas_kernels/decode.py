"""Attention of a few queries to many keys: programs share the keys, and a second kernel combines their results.

All queries of the heads that share a key head are the rows of one tile, so that each key is read once. Cache entries
after the last query or before the window are not read (like Flash-Decoding, vLLM and Lean Attention).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.attention import attend, finish, nothing
from pallas_kernels.attention_tiles import Segments, load_rows, rows_of, tile_of
from pallas_kernels.launch import launch
from pallas_kernels.tiles import Architecture, tile

ROWS = 64  # maximum rows (query heads of a key head × queries) for this kernel
LEAST_ROWS = 16  # minimum rows of a matmul
MOST_PARTS = 128  # maximum parts that one program combines


def decodes(q_bshc: jax.Array, k_btkc: jax.Array) -> bool:
    """Return whether there are so few queries that splitting the keys is faster."""
    return q_bshc.shape[1] * q_bshc.shape[2] // k_btkc.shape[2] <= ROWS


def attention_decode(
    q_bshc: jax.Array, k_btkc: jax.Array, v_btkc: jax.Array, segments: Segments, offset: jax.Array, *,
    window: int | None, dtype: jax.typing.DTypeLike, architecture: Architecture,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Compute the same as `attention_forward`, for queries for which `decodes` is true."""
    b, s, h, c = q_bshc.shape
    t, num_kv = k_btkc.shape[1:3]
    shape = (b, s, t, h // num_kv)
    sizes = tile_of("decode", architecture, q_bshc)
    rows = max(LEAST_ROWS, pl.next_power_of_2(s * h // num_kv))
    keys, programs = sizes.sizes[0], tile("decode", architecture, q_bshc.dtype).sizes[1]
    most = min(programs // (b * num_kv), pl.cdiv(t, 2 * keys), MOST_PARTS)
    parts = 1 << (max(most, 1).bit_length() - 1)
    o_parts, lse_parts = launch(
        functools.partial(_kernel, shape=shape, sizes=(rows, keys), window=window),
        offset[None], q_bshc, k_btkc, v_btkc, *(segments or ()),
        name="attention_decode",
        grid=(parts, b * num_kv),
        out_shape=(jax.ShapeDtypeStruct((b, s, h, parts * c), jnp.float32),
                   jax.ShapeDtypeStruct((b, s, h, parts), jnp.float32)),
        warps=sizes.warps, stages=sizes.stages, architecture=architecture,
    )  # fmt: skip
    o, lse = launch(
        functools.partial(_join_kernel, parts=parts, c=c),
        o_parts.reshape(-1, c), lse_parts.reshape(-1),
        name="attention_join",
        grid=(b * s * h,),
        out_shape=(jax.ShapeDtypeStruct((b * s * h, c), dtype), jax.ShapeDtypeStruct((b * s * h,), jnp.float32)),
        warps=sizes.warps, architecture=architecture,
    )  # fmt: skip
    return o.reshape(b, s, h, c), lse.reshape(b, s, h)


def _kernel(offset_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any, shape: tuple[int, int, int, int],
            sizes: tuple[int, int], window: int | None) -> None:  # fmt: skip
    *segments, o_ref, lse_ref = refs
    q_seg_ref, k_seg_ref = segments or (None, None)
    (_, s, t, _), (_, keys) = shape, sizes
    num_kv, c = k_ref.shape[2:]
    part, parts = pl.program_id(0), pl.num_programs(0)
    batch, kv_head = pl.program_id(1) // num_kv, pl.program_id(1) % num_kv
    offset = offset_ref[0]
    rows = rows_of(0, sizes[0], shape, batch, kv_head, offset, q_seg_ref)

    # Split what is visible now, which may be a small part of the cache.
    high = (jnp.clip(offset + s, 0, t) + keys - 1) // keys
    low = 0 if window is None else jnp.clip(offset - window + 1, 0, t) // keys
    each = (jnp.maximum(high - low, 0) + parts - 1) // parts
    first = low + part * each
    last = jnp.minimum(first + each, high)

    step = functools.partial(attend, rows, load_rows(q_ref, rows), k_ref, v_ref, k_seg_ref, kv_head, keys, window)
    state = nothing(sizes[0], c)
    state = jax.lax.fori_loop(first, last, lambda i, state: step(i, state, True), state)
    o, lse = finish(state)
    channels = part * c + jnp.arange(c, dtype=jnp.int32)[None, :]
    at = (batch, rows.query[:, None], rows.head[:, None], channels)
    triton.store(o_ref.at[at], o, mask=rows.inside[:, None] & (channels >= 0))
    triton.store(lse_ref.at[batch, rows.query, rows.head, part], lse, mask=rows.inside)


def _join_kernel(o_parts_ref: Any, lse_parts_ref: Any, o_ref: Any, lse_ref: Any, *, parts: int, c: int) -> None:
    row = pl.program_id(0)
    part = row * parts + jnp.arange(parts, dtype=jnp.int32)
    channels = jnp.arange(c, dtype=jnp.int32)
    lse = triton.load(lse_parts_ref.at[part])
    top = lse.max(0)
    weight = jnp.exp(lse - top)
    total = weight.sum(0)
    o = triton.load(o_parts_ref.at[part[:, None], channels[None, :]])
    triton.store(o_ref.at[row, channels], ((o * weight[:, None]).sum(0) / total).astype(o_ref.dtype))
    triton.store(lse_ref.at[row], top + jnp.log(total))
