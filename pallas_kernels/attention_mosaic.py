"""Flash attention, forward, for Hopper, with Pallas' Mosaic GPU backend (arXiv 2407.08608).

A block has three warpgroups. One copies tiles of keys and values to shared memory. The others each process one of two
query heads that share a key head, for the same queries, with an online softmax in fp32, and take turns: while one
multiplies on the tensor cores, the other computes exponentials. `attention_tiles.ranges` says which tiles are visited.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as gpu

from pallas_kernels import attention_mosaic_tiles as mosaic
from pallas_kernels import attention_tiles as tiles
from pallas_kernels.attention_mosaic_tiles import Steps, across, matrices
from pallas_kernels.attention_tiles import FLOOR, HIDDEN, LN_2, LOG2_E, AttentionInputs, Refs
from pallas_kernels.launch import Out
from pallas_kernels.tiles import Architecture, tile

_HEADS = mosaic.COMPUTING  # query heads of a block, one for each warpgroup that computes


class _Shared(NamedTuple):
    """Shared memory of a block. A barrier opens when all have arrived, and closes again."""

    q: Any  # [heads, queries, c]; in the end the output
    k: Any  # [stages, keys, c]
    v: Any
    query_segments: Any  # [heads, queries]; None without documents
    key_segments: Any  # [stages, keys]
    q_copied: Any  # barrier for each head
    k_copied: Any  # barrier for each stage, like the next three
    v_copied: Any
    k_read: Any
    v_read: Any
    turn: Any  # barrier at which the heads change places


def attention_forward(
    x: AttentionInputs, *, dtype: jax.typing.DTypeLike, architecture: Architecture
) -> tuple[jax.Array, jax.Array]:
    """Compute `attention.attention_forward` on sm_90, in bfloat16, for heads of 64 or 128 channels.

    The number of query heads per key head is even, and queries and keys are whole tiles.
    """
    (b, s, h, c), num_kv = x.q_bshc.shape, x.k_btkc.shape[2]
    entry = tile("attention_mosaic", architecture, x.q_bshc.dtype)
    queries, keys = entry.sizes
    kernel = functools.partial(_kernel, window=x.window, interpreted=mosaic.interpreted(architecture))
    bounds = tiles.ranges(x, (queries * (h // num_kv), keys))
    arrays = jnp.reshape(x.query_offset, (1,)), bounds, Refs.of(x)
    out = Out((b, s, h, c), dtype), Out((b, h, s), jnp.float32)
    shared = _shared(queries, keys, entry.stages, c, x.query_segments_bs is not None)
    grid = s // queries, b, h // _HEADS  # heads that share keys run together
    o, lse_bhs = mosaic.launch("attention_mosaic", kernel, arrays, out, shared, grid, architecture)
    return o, lse_bhs.transpose(0, 2, 1)


def _shared(queries: int, keys: int, stages: int, c: int, segmented: bool) -> _Shared:
    barrier = mosaic.barriers
    return _Shared(
        q=matrices(_HEADS, queries, c),
        k=matrices(stages, keys, c),
        v=matrices(stages, keys, c),
        query_segments=gpu.SMEM((_HEADS, queries), jnp.int32) if segmented else None,
        key_segments=gpu.SMEM((stages, keys), jnp.int32) if segmented else None,
        q_copied=barrier(_HEADS, 1 + segmented),
        k_copied=barrier(stages, 1 + segmented),
        v_copied=barrier(stages, 1),
        k_read=barrier(stages, _HEADS),
        v_read=barrier(stages, _HEADS),
        turn=barrier(1, _HEADS),
    )


def _kernel(
    offset_ref: Any, bounds_ref: Any, x: Refs, o_ref: Any, lse_ref: Any, shared: _Shared, *, window: int | None,
    interpreted: bool,
) -> None:  # fmt: skip
    row, heads = lax.axis_index("row"), lax.axis_index("heads")
    index = bounds_ref.shape[1] - 1 - lax.axis_index("tile")  # longest blocks first: the last rows see the most keys
    steps = Steps(*(bounds_ref[row, index, i] for i in range(4)))

    def copy() -> None:
        key_head = heads * _HEADS // (x.q.shape[2] // x.k.shape[2])
        lax.fori_loop(0, steps.visits, lambda i, _: _copy_keys(x, shared, (row, key_head), i, steps.tile(i)), None)

    def compute(warpgroup: Any) -> None:
        queries, c = shared.q.shape[1:]
        at = row, pl.ds(index * queries, queries), heads * _HEADS + warpgroup
        segments, position = _copy_rows(x, shared, at, warpgroup), index * queries + offset_ref[0]

        def step(i: Any, state: State, masked: bool) -> State:
            first = steps.tile(i) * shared.k.shape[1]
            seen = functools.partial(mosaic.seen, (queries, shared.k.shape[1]), 0, position - first, window, segments)
            slot = lax.rem(i, shared.k.shape[0])
            return _attend(shared, warpgroup, slot, seen if masked else None, interpreted, state)

        top, total = (gpu.layout_cast(jnp.full((queries,), value, jnp.float32), mosaic.BY_AXIS[0])
                      for value in (FLOOR, 0))  # fmt: skip
        state = top, total, gpu.layout_cast(jnp.zeros((queries, c), jnp.float32), mosaic.WHOLE)
        pl.when(warpgroup == 1)(lambda: _change_places(shared))  # it is half a step behind the other
        state = lax.fori_loop(0, steps.unmasked, functools.partial(step, masked=False), state)
        top, total, acc = lax.fori_loop(steps.unmasked, steps.visits, functools.partial(step, masked=True), state)
        pl.when(warpgroup == 0)(lambda: _change_places(shared))
        safe = jnp.where(total == 0, 1.0, total)
        lse_ref[at[0], at[2], at[1]] = jnp.where(total == 0, FLOOR, top * LN_2 + jnp.log(safe))
        mosaic.store(o_ref, at, shared.q.at[warpgroup], acc * across(1 / safe, acc.shape))

    mosaic.specialize(copy, compute)


def _copy_keys(x: Refs, shared: _Shared, head: tiles.Head, step: Any, index: Any) -> None:
    """Copy a tile of keys and values, as soon as both heads have read what is in its place."""
    stages, num_keys = shared.k.shape[:2]
    slot, (row, key_head), keys = lax.rem(step, stages), head, pl.ds(index * num_keys, num_keys)
    pl.when(step >= stages)(lambda: gpu.barrier_wait(shared.k_read.at[slot]))
    gpu.copy_gmem_to_smem(x.k.at[row, keys, key_head], shared.k.at[slot], shared.k_copied.at[slot])
    if x.key_segments is not None:
        gpu.copy_gmem_to_smem(x.key_segments.at[row, keys], shared.key_segments.at[slot], shared.k_copied.at[slot])
    pl.when(step >= stages)(lambda: gpu.barrier_wait(shared.v_read.at[slot]))
    gpu.copy_gmem_to_smem(x.v.at[row, keys, key_head], shared.v.at[slot], shared.v_copied.at[slot])


def _copy_rows(x: Refs, shared: _Shared, at: tuple[Any, ...], warpgroup: Any) -> jax.Array | None:
    """Copy the queries of a head, and return their documents."""
    copied = shared.q_copied.at[warpgroup]
    gpu.copy_gmem_to_smem(x.q.at[at], shared.q.at[warpgroup], copied)
    if x.query_segments is not None:
        gpu.copy_gmem_to_smem(x.query_segments.at[at[:2]], shared.query_segments.at[warpgroup], copied)
    gpu.barrier_wait(copied)
    return None if x.query_segments is None else mosaic.load_vector(shared.query_segments.at[warpgroup], 0)


State = tuple[jax.Array, jax.Array, jax.Array]  # as of `attention.attend`


def _attend(shared: _Shared, warpgroup: Any, slot: Any, seen: Any, interpreted: bool, state: State) -> State:
    """Update the state of a head with the tile of keys in `slot`, of which it sees all without `seen`."""
    top, total, acc = state

    def multiply(ref: Any) -> jax.Array:
        gpu.wgmma(ref, shared.q.at[warpgroup], shared.k.at[slot].transpose((1, 0)))
        _change_places(shared)  # the other's products queue up behind these
        return ref[...]

    gpu.barrier_wait(shared.k_copied.at[slot])
    scores = pl.run_scoped(multiply, mosaic.ACCUMULATOR((acc.shape[0], shared.k.shape[1]), jnp.float32))
    key_segment = None
    if seen is not None and shared.key_segments is not None:
        key_segment = mosaic.load_vector(shared.key_segments.at[slot], 1)
        gpu.commit_smem()  # before a copy overwrites what was read
    gpu.barrier_arrive(shared.k_read.at[slot])
    if seen is not None:
        scores = jnp.where(seen(key_segment), scores, HIDDEN)
    scale = LOG2_E * acc.shape[1] ** -0.5
    new_top = jnp.maximum(top, scores.max(1) * scale)
    p = jnp.exp2(scores * scale - across(new_top, scores.shape))
    keep = jnp.exp2(top - new_top)
    total, acc, rounded = total * keep + p.sum(1), acc * across(keep, acc.shape), p.astype(jnp.bfloat16)
    _change_places(shared)
    gpu.barrier_wait(shared.v_copied.at[slot])
    (acc,) = mosaic.accumulate(lambda ref: mosaic.add_product(ref, rounded, shared.v.at[slot]), (acc,), interpreted)
    gpu.barrier_arrive(shared.v_read.at[slot])
    return new_top, total, acc


def _change_places(shared: _Shared) -> None:
    gpu.barrier_arrive(shared.turn)
    gpu.barrier_wait(shared.turn)
