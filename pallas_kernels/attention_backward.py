"""Flash attention, backward: one kernel for the gradients of keys and values, one for those of queries.

Both recompute the probabilities from the saved log-sum-exp. Each program sums in registers, and alone writes
its results: without atomics, they do not depend on the order of programs (arXiv 2307.08691 §3.1).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.attention_tiles import (
    LOG2_E,
    Rows,
    Segments,
    key_segments,
    key_tile,
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


def backward_ranges(
    q_bshc: jax.Array, k_btkc: jax.Array, segments: Segments, offset: jax.Array, *, window: int | None,
    architecture: Architecture,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Compute the `ranges` of both kernels of `attention_backward`, which depend on documents only."""
    b, s, h, _ = q_bshc.shape
    shape = (b, s, k_btkc.shape[1], h // k_btkc.shape[2])
    by_keys, by_queries = (
        ranges(segments, offset, shape, tile_of(name, architecture, q_bshc).sizes, window, of_keys=of_keys)
        for name, of_keys in (("attention_backward_keys", True), ("attention_backward_queries", False))
    )
    return by_keys, by_queries


def attention_backward(
    q_bshc: jax.Array, k_btkc: jax.Array, v_btkc: jax.Array, segments: Segments, offset: jax.Array,
    bounds: tuple[jax.Array, jax.Array], lse_bsh: jax.Array, delta_bsh: jax.Array, do_bshc: jax.Array, *,
    window: int | None, dtype: jax.typing.DTypeLike, architecture: Architecture,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Compute the gradients of q, k and v.

    Args:
      q_bshc: as in `attention_forward`.
      k_btkc: as in `attention_forward`.
      v_btkc: as in `attention_forward`.
      segments: as in `attention_forward`.
      offset: as in `attention_forward`.
      bounds: result of `backward_ranges`.
      lse_bsh: fp32 log-sum-exp of each query, over all keys that it sees, also on other devices.
      delta_bsh: fp32, sum over channels of output times its gradient.
      do_bshc: gradient of the output, in the dtype of q.
      window: as in `attention_forward`.
      dtype: dtype of the gradients; they are summed in fp32.
      architecture: see `launch`.

    Returns:
      [b, s, h, c], [b, t, k, c], [b, t, k, c].
    """
    b, s, h, c = q_bshc.shape
    t, num_kv = k_btkc.shape[1:3]
    shape = (b, s, t, h // num_kv)
    arrays = (q_bshc, k_btkc, v_btkc, do_bshc, lse_bsh, delta_bsh, *(segments or ()))

    by_keys, by_queries = bounds
    tile = tile_of("attention_backward_keys", architecture, q_bshc)
    dk, dv = launch(
        functools.partial(_keys_kernel, shape=shape, sizes=tile.sizes, window=window),
        offset[None], by_keys, *arrays,
        name="attention_backward_keys",
        grid=(b * num_kv, by_keys.shape[1]),
        out_shape=(jax.ShapeDtypeStruct((b, t, num_kv, c), dtype),) * 2,
        warps=tile.warps, stages=tile.stages, architecture=architecture,
    )  # fmt: skip

    tile = tile_of("attention_backward_queries", architecture, q_bshc)
    dq = launch(
        functools.partial(_queries_kernel, shape=shape, sizes=tile.sizes, window=window),
        offset[None], by_queries, *arrays,
        name="attention_backward_queries",
        grid=(b * num_kv, by_queries.shape[1]),
        out_shape=jax.ShapeDtypeStruct((b, s, h, c), dtype),
        warps=tile.warps, stages=tile.stages, architecture=architecture,
    )  # fmt: skip
    return dq, dk, dv


def _keys_kernel(offset_ref: Any, bounds_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, do_ref: Any, lse_ref: Any,
                 delta_ref: Any, *refs: Any, shape: tuple[int, int, int, int], sizes: tuple[int, ...],
                 window: int | None) -> None:  # fmt: skip
    *segments, dk_ref, dv_ref = refs
    q_seg_ref, k_seg_ref = segments or (None, None)
    num_kv, c = k_ref.shape[2:]
    batch, kv_head = pl.program_id(0) // num_kv, pl.program_id(0) % num_kv
    index = pl.program_id(1)  # longest programs first: the most rows see the first keys
    keys = index * sizes[1] + jnp.arange(sizes[1], dtype=jnp.int32)
    k = load_keys(k_ref, batch, keys, kv_head, bounded=True)
    v = load_keys(v_ref, batch, keys, kv_head, bounded=True)
    k_seg = key_segments(k_seg_ref, batch, keys)
    offset, scale = offset_ref[0], c**-0.5

    def step(i: Any, state: tuple[jax.Array, jax.Array], masked: bool) -> tuple[jax.Array, jax.Array]:
        dk, dv = state
        rows = rows_of(i, sizes[0], shape, batch, kv_head, offset, q_seg_ref if masked else None)
        q, do = load_rows(q_ref, rows), load_rows(do_ref, rows)
        # With keys first, no matmul transposes a tile of scores.
        p = jnp.exp2(product(k, q, (1, 1)) * (LOG2_E * scale) - (load_rows(lse_ref, rows) * LOG2_E)[None, :])
        if masked:
            p = jnp.where(seen(rows, keys, k_seg, k_ref.shape[1], window, keys_first=True), p, 0.0)
        dv = dv + product(p.astype(do.dtype), do)
        ds = p * (product(v, do, (1, 1)) - load_rows(delta_ref, rows)[None, :])
        return dk + product(ds.astype(q.dtype), q), dv

    zeros = jnp.zeros((sizes[1], c), jnp.float32)
    dk, dv = visit(tuple(bounds_ref[batch, index, i] for i in range(4)), step, (zeros, zeros))
    at, mask = key_tile(dk_ref, batch, keys, kv_head, bounded=True)
    triton.store(dk_ref.at[at], (dk * scale).astype(dk_ref.dtype), mask=mask)
    triton.store(dv_ref.at[at], dv.astype(dv_ref.dtype), mask=mask)


def _queries_kernel(offset_ref: Any, bounds_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, do_ref: Any, lse_ref: Any,
                    delta_ref: Any, *refs: Any, shape: tuple[int, int, int, int], sizes: tuple[int, ...],
                    window: int | None) -> None:  # fmt: skip
    *segments, dq_ref = refs
    q_seg_ref, k_seg_ref = segments or (None, None)
    num_kv, c = k_ref.shape[2:]
    batch, kv_head = pl.program_id(0) // num_kv, pl.program_id(0) % num_kv
    index = pl.num_programs(1) - 1 - pl.program_id(1)  # longest programs first: the last rows see the most keys
    rows: Rows = rows_of(index, sizes[0], shape, batch, kv_head, offset_ref[0], q_seg_ref)
    q, do = load_rows(q_ref, rows), load_rows(do_ref, rows)
    lse, delta = load_rows(lse_ref, rows) * LOG2_E, load_rows(delta_ref, rows)
    scale = c**-0.5

    def step(i: Any, dq: jax.Array, masked: bool) -> jax.Array:
        keys = i * sizes[1] + jnp.arange(sizes[1], dtype=jnp.int32)
        k = load_keys(k_ref, batch, keys, kv_head, bounded=masked)
        p = jnp.exp2(product(q, k, (1, 1)) * (LOG2_E * scale) - lse[:, None])
        if masked:
            k_seg = key_segments(k_seg_ref, batch, keys)
            p = jnp.where(seen(rows, keys, k_seg, k_ref.shape[1], window), p, 0.0)
        v = load_keys(v_ref, batch, keys, kv_head, bounded=masked)
        ds = p * (product(do, v, (1, 1)) - delta[:, None])
        return dq + product(ds.astype(k.dtype), k)

    bounds = tuple(bounds_ref[batch, index, i] for i in range(4))
    dq = visit(bounds, step, jnp.zeros((sizes[0], c), jnp.float32))
    store_rows(dq_ref, rows, dq * scale)
