"""Flash attention, forward: causal, grouped queries, packed documents, sliding window (arXiv 2205.14135, 2307.08691).

Each program processes a tile of rows (`attention_tiles`), and visits the tiles of keys that any of its rows sees, with
an online softmax in fp32. No array of the size queries × keys is written.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention_tiles import (
    FLOOR,
    HIDDEN,
    LN_2,
    LOG2_E,
    Rows,
    Segments,
    key_segments,
    load_keys,
    load_rows,
    ranges,
    rows_of,
    seen,
    store_rows,
    tile_of,
    visit,
)
from pallas_kernels.launch import launch
from pallas_kernels.product import product
from pallas_kernels.tiles import Architecture


def attention_forward(
    q_bshc: jax.Array, k_btkc: jax.Array, v_btkc: jax.Array, segments: Segments, offset: jax.Array, *,
    window: int | None, dtype: jax.typing.DTypeLike, architecture: Architecture,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Compute causal attention.

    Args:
      q_bshc: queries, bf16 or fp32.
      k_btkc: keys, of the same dtype.
      v_btkc: values, of the same dtype.
      segments: int32 documents of queries [b, s] and keys [b, t], 0 for padding; None for one document per row.
      offset: int32 scalar, index of the first query among the keys; may be negative.
      window: number of keys that a query sees, its own included; None for all.
      dtype: dtype of the output.
      architecture: see `launch`.

    Returns:
      The output [b, s, h, c], and the log-sum-exp of each query, fp32 [b, s, h]; 0 and `FLOOR` for a query that sees no
      key.
    """
    b, s, h, c = q_bshc.shape
    t, num_kv = k_btkc.shape[1:3]
    tile = tile_of("attention", architecture, q_bshc)
    rows, keys = tile.sizes
    shape = (b, s, t, h // num_kv)
    bounds = ranges(segments, offset, shape, (rows, keys), window)
    return launch(
        functools.partial(_kernel, shape=shape, sizes=(rows, keys), window=window),
        offset[None], bounds, q_bshc, k_btkc, v_btkc, *(segments or ()),
        name="attention",
        grid=(b * num_kv, bounds.shape[1]),
        out_shape=(jax.ShapeDtypeStruct((b, s, h, c), dtype), jax.ShapeDtypeStruct((b, s, h), jnp.float32)),
        warps=tile.warps, stages=tile.stages, architecture=architecture,
    )  # fmt: skip


def _kernel(offset_ref: Any, bounds_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, *refs: Any,
            shape: tuple[int, int, int, int], sizes: tuple[int, int], window: int | None) -> None:  # fmt: skip
    *segments, o_ref, lse_ref = refs
    q_seg_ref, k_seg_ref = segments or (None, None)
    num_kv = k_ref.shape[2]
    batch, kv_head = pl.program_id(0) // num_kv, pl.program_id(0) % num_kv
    index = pl.num_programs(1) - 1 - pl.program_id(1)  # longest programs first: the last rows see the most keys
    rows = rows_of(index, sizes[0], shape, batch, kv_head, offset_ref[0], q_seg_ref)
    bounds = tuple(bounds_ref[batch, index, i] for i in range(4))
    step = functools.partial(attend, rows, load_rows(q_ref, rows), k_ref, v_ref, k_seg_ref, kv_head, sizes[1], window)
    o, lse = finish(visit(bounds, step, nothing(sizes[0], q_ref.shape[3])))
    store_rows(o_ref, rows, o)
    store_rows(lse_ref, rows, lse)


State = tuple[jax.Array, jax.Array, jax.Array]  # online softmax, fp32: maximum [r], sum [r], output [r, c]


def nothing(rows: int, c: int) -> State:
    """Return the state before the first key."""
    return jnp.full((rows,), FLOOR, jnp.float32), jnp.zeros((rows,), jnp.float32), jnp.zeros((rows, c), jnp.float32)


def attend(rows: Rows, q: jax.Array, k_ref: Any, v_ref: Any, k_seg_ref: Any, kv_head: Any, size: int,
           window: int | None, index: Any, state: State, masked: bool) -> State:  # fmt: skip
    """Update the state with tile `index` of keys. Scores are to base 2, since GPUs have an instruction for 2ˣ."""
    top, total, acc = state
    keys = index * size + jnp.arange(size, dtype=jnp.int32)
    k = load_keys(k_ref, rows.batch, keys, kv_head, bounded=masked)
    scores = product(q, k, (1, 1)) * (LOG2_E * q.shape[1] ** -0.5)
    if masked:
        segments = key_segments(k_seg_ref, rows.batch, keys)
        scores = jnp.where(seen(rows, keys, segments, k_ref.shape[1], window), scores, HIDDEN)
    new_top = jnp.maximum(top, scores.max(1))
    p = jnp.exp2(scores - new_top[:, None])
    keep = jnp.exp2(top - new_top)
    v = load_keys(v_ref, rows.batch, keys, kv_head, bounded=masked)
    acc = acc * keep[:, None] + product(p.astype(v.dtype), v)
    return new_top, total * keep + p.sum(1), acc


def finish(state: State) -> tuple[jax.Array, jax.Array]:
    """Return the output [r, c], and the natural log-sum-exp [r]."""
    top, total, acc = state
    safe = jnp.where(total == 0, 1.0, total)
    lse = jnp.where(total == 0, FLOOR, (top + jnp.log2(safe)) * LN_2)
    return acc / safe[:, None], lse
