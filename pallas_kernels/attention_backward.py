"""Flash attention, backward: one kernel for the gradients of keys and values, one for those of queries.

Both recompute the probabilities from the saved log-sum-exp. Each program sums in registers, and alone writes
its results: without atomics, they do not depend on the order of programs (arXiv 2307.08691 §3.1).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import attention_tiles as tiles
from pallas_kernels.attention_tiles import LOG2_E, AttentionInputs, Refs, Static
from pallas_kernels.launch import Out, launch, store
from pallas_kernels.product import product
from pallas_kernels.tiles import Architecture

_KEYS, _QUERIES = "attention_backward_keys", "attention_backward_queries"


def backward_ranges(x: AttentionInputs, *, architecture: Architecture) -> tuple[jax.Array, jax.Array]:
    """Compute the `ranges` of both kernels of `attention_backward`, which depend on documents only."""
    sizes = [tiles.tile_of(name, architecture, x.q_bshc).sizes for name in (_KEYS, _QUERIES)]
    return tiles.ranges(x, sizes[0], of_keys=True), tiles.ranges(x, sizes[1])


def attention_backward(
    x: AttentionInputs, bounds: tuple[jax.Array, jax.Array], saved: tuple[jax.Array, jax.Array, jax.Array], *,
    dtype: jax.typing.DTypeLike, architecture: Architecture,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Compute the gradients of q, k and v, in `dtype`, with sums in fp32.

    `bounds` is the result of `backward_ranges`. `saved` are the gradient of the output, in the dtype of q; the
    log-sum-exp of each query over all keys that it sees, also on other devices; and the sum over channels of the output
    times its gradient, both fp32 [b, s, h].
    """

    def run(name: str, kernel: Any, bounds: jax.Array, out: Any) -> Any:
        tile = tiles.tile_of(name, architecture, x.q_bshc)
        kernel, grid = functools.partial(kernel, static=Static.of(tile, x)), (programs, bounds.shape[1])
        return launch(name, kernel, (x.query_offset[None], bounds, Refs.of(x, *saved)), out, grid, tile, architecture)

    programs = x.q_bshc.shape[0] * x.k_btkc.shape[2]
    dk, dv = run(_KEYS, _keys_kernel, bounds[0], (Out(x.k_btkc.shape, dtype),) * 2)
    return run(_QUERIES, _queries_kernel, bounds[1], Out(x.q_bshc.shape, dtype)), dk, dv


def _keys_kernel(offset_ref: Any, bounds_ref: Any, x: Refs, dk_ref: Any, dv_ref: Any, *, static: Static) -> None:
    c, head = x.k.shape[3], tiles.key_head(x, 0)
    index = pl.program_id(1)  # longest programs first: the most rows see the first keys
    keys = index * static.keys + jnp.arange(static.keys, dtype=jnp.int32)
    k = tiles.load_keys(x.k, head, keys, bounded=True)
    v = tiles.load_keys(x.v, head, keys, bounded=True)
    k_seg = tiles.key_segments(x, head, keys)
    offset, scale = offset_ref[0], c**-0.5

    def step(i: Any, state: tuple[jax.Array, jax.Array], masked: bool) -> tuple[jax.Array, jax.Array]:
        dk, dv = state
        rows = tiles.rows_of(x, head, i, static.rows, offset, segmented=masked)
        q, do = tiles.load_rows(x.q, rows), tiles.load_rows(x.do, rows)
        # With keys first, no matmul transposes a tile of scores.
        p = jnp.exp2(product(k, q, (1, 1)) * (LOG2_E * scale) - (tiles.load_rows(x.lse, rows) * LOG2_E)[None, :])
        if masked:
            p = jnp.where(tiles.seen(x, rows, keys, k_seg, static.window, keys_first=True), p, 0.0)
        dv = dv + product(p.astype(do.dtype), do)
        ds = p * (product(v, do, (1, 1)) - tiles.load_rows(x.delta, rows)[None, :])
        return dk + product(ds.astype(q.dtype), q), dv

    zeros = jnp.zeros((static.keys, c), jnp.float32)
    dk, dv = tiles.visit(tiles.bounds_of(bounds_ref, head, index), step, (zeros, zeros))
    at, mask = tiles.key_tile(dk_ref, head, keys, bounded=True)
    store(dk_ref.at[at], (dk * scale).astype(dk_ref.dtype), mask=mask)
    store(dv_ref.at[at], dv.astype(dv_ref.dtype), mask=mask)


def _queries_kernel(offset_ref: Any, bounds_ref: Any, x: Refs, dq_ref: Any, *, static: Static) -> None:
    c, head = x.k.shape[3], tiles.key_head(x, 0)
    index = pl.num_programs(1) - 1 - pl.program_id(1)  # longest programs first: the last rows see the most keys
    rows = tiles.rows_of(x, head, index, static.rows, offset_ref[0])
    q, do = tiles.load_rows(x.q, rows), tiles.load_rows(x.do, rows)
    lse, delta = tiles.load_rows(x.lse, rows) * LOG2_E, tiles.load_rows(x.delta, rows)
    scale = c**-0.5

    def step(i: Any, dq: jax.Array, masked: bool) -> jax.Array:
        keys = i * static.keys + jnp.arange(static.keys, dtype=jnp.int32)
        k = tiles.load_keys(x.k, head, keys, bounded=masked)
        p = jnp.exp2(product(q, k, (1, 1)) * (LOG2_E * scale) - lse[:, None])
        if masked:
            p = jnp.where(tiles.seen(x, rows, keys, tiles.key_segments(x, head, keys), static.window), p, 0.0)
        v = tiles.load_keys(x.v, head, keys, bounded=masked)
        ds = p * (product(do, v, (1, 1)) - delta[:, None])
        return dq + product(ds.astype(k.dtype), k)

    bounds = tiles.bounds_of(bounds_ref, head, index)
    dq = tiles.visit(bounds, step, jnp.zeros((static.rows, c), jnp.float32))
    tiles.store_rows(dq_ref, rows, dq * scale)
