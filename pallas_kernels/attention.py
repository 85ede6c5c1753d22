"""Flash attention, forward: causal, grouped queries, packed documents, sliding window (arXiv 2205.14135, 2307.08691).

Each program processes a tile of rows (`attention_tiles`), and visits the tiles of keys that any of its rows sees, with
an online softmax in fp32. No array of the size queries × keys is written.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import attention_tiles as tiles
from pallas_kernels.attention_tiles import FLOOR, HIDDEN, LN_2, LOG2_E, AttentionInputs, Refs, Rows, Static
from pallas_kernels.launch import Out, launch
from pallas_kernels.product import product
from pallas_kernels.tiles import Architecture


def attention_forward(
    x: AttentionInputs, *, dtype: jax.typing.DTypeLike, architecture: Architecture
) -> tuple[jax.Array, jax.Array]:
    """Compute causal attention.

    Returns the output [b, s, h, c] in `dtype`, and the log-sum-exp of each query, fp32 [b, s, h]; 0 and `FLOOR` for a
    query that sees no key.
    """
    (b, s, h, c), num_kv = x.q_bshc.shape, x.k_btkc.shape[2]
    tile = tiles.tile_of("attention", architecture, x.q_bshc)
    bounds = tiles.ranges(x, tile.sizes)
    kernel = functools.partial(_kernel, static=Static.of(tile, x))
    out, grid = (Out((b, s, h, c), dtype), Out((b, s, h), jnp.float32)), (b * num_kv, bounds.shape[1])
    return launch("attention", kernel, (x.query_offset[None], bounds, Refs.of(x)), out, grid, tile, architecture)


def _kernel(offset_ref: Any, bounds_ref: Any, x: Refs, o_ref: Any, lse_ref: Any, *, static: Static) -> None:
    head = tiles.key_head(x, 0)
    index = pl.num_programs(1) - 1 - pl.program_id(1)  # longest programs first: the last rows see the most keys
    rows = tiles.rows_of(x, head, index, static.rows, offset_ref[0])
    bounds = tiles.bounds_of(bounds_ref, head, index)
    step = functools.partial(attend, x, rows, tiles.load_rows(x.q, rows), static)
    o, lse = finish(tiles.visit(bounds, step, nothing(static.rows, x.q.shape[3])))
    tiles.store_rows(o_ref, rows, o)
    tiles.store_rows(lse_ref, rows, lse)


State = tuple[jax.Array, jax.Array, jax.Array]  # online softmax, fp32: maximum [r], sum [r], output [r, c]


def nothing(rows: int, c: int) -> State:
    """Return the state before the first key."""
    return jnp.full((rows,), FLOOR, jnp.float32), jnp.zeros((rows,), jnp.float32), jnp.zeros((rows, c), jnp.float32)


def attend(x: Refs, rows: Rows, q: jax.Array, static: Static, index: Any, state: State, masked: bool) -> State:
    """Update the state with tile `index` of keys. Scores are to base 2, since GPUs have an instruction for 2ˣ."""
    top, total, acc = state
    keys = index * static.keys + jnp.arange(static.keys, dtype=jnp.int32)
    k = tiles.load_keys(x.k, rows.head, keys, bounded=masked)
    scores = product(q, k, (1, 1)) * (LOG2_E * q.shape[1] ** -0.5)
    if masked:
        segments = tiles.key_segments(x, rows.head, keys)
        scores = jnp.where(tiles.seen(x, rows, keys, segments, static.window), scores, HIDDEN)
    new_top = jnp.maximum(top, scores.max(1))
    p = jnp.exp2(scores - new_top[:, None])
    keep = jnp.exp2(top - new_top)
    v = tiles.load_keys(x.v, rows.head, keys, bounded=masked)
    acc = acc * keep[:, None] + product(p.astype(v.dtype), v)
    return new_top, total * keep + p.sum(1), acc


def finish(state: State) -> tuple[jax.Array, jax.Array]:
    """Return the output [r, c], and the natural log-sum-exp [r]."""
    top, total, acc = state
    safe = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(total == 0, FLOOR, (top + jnp.log2(safe)) * LN_2)
    return acc / safe[:, None], lse
