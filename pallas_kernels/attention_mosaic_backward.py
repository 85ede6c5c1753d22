"""Flash attention, backward, for Hopper, with Pallas' Mosaic GPU backend (arXiv 2407.08608).

One kernel computes the gradients of keys and values, one those of queries. A block keeps tiles of one side in shared
memory, keys or queries, and visits tiles of the other, from which it recomputes the probabilities. Each warpgroup that
computes has 64 keys, or one of two query heads that share a key head, and its gradients in registers. It alone writes
them: without atomics, results do not depend on the order of blocks.
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
from pallas_kernels.attention_mosaic_tiles import COMPUTING, Steps
from pallas_kernels.attention_tiles import HIDDEN, LOG2_E, AttentionInputs, Refs
from pallas_kernels.launch import Out
from pallas_kernels.tiles import Architecture, tile

KEYS, QUERIES = "attention_mosaic_keys", "attention_mosaic_queries"


class _Side(NamedTuple):
    """Queries or keys: whole arrays, or tiles of them in shared memory, [tiles, tokens] and the channels of a head."""

    first: Any  # queries or keys
    second: Any  # the gradient of the output, or values
    segments: Any  # documents; None without
    scores: Any  # of queries, what the sums start at: scores at -log-sum-exp, in an array [b, h, s]; None of keys
    products: Any  # those of values and the gradient of the output at -delta
    copied: Any = None  # barrier for each tile in shared memory

    def at(self, index: Any) -> "_Side":
        """Return a tile."""
        return _Side(*(None if ref is None else ref.at[index] for ref in self))


class _Shared(NamedTuple):
    """Shared memory of a block."""

    kept: _Side  # a tile for each warpgroup that computes; in the end its gradients
    visited: _Side  # a tile for each stage
    read: Any  # barrier for each stage


def backward_ranges(x: AttentionInputs, *, architecture: Architecture) -> tuple[jax.Array, jax.Array]:
    """Compute the `ranges` of both kernels of `attention_backward`, which depend on documents only."""
    groups = x.q_bshc.shape[2] // x.k_btkc.shape[2]
    sizes = [tile(name, architecture, x.q_bshc.dtype).sizes for name in (KEYS, QUERIES)]
    of_keys, of_queries = ((queries * groups, keys) for queries, keys in sizes)
    return tiles.ranges(x, of_keys, of_keys=True), tiles.ranges(x, of_queries)


def attention_backward(
    x: AttentionInputs, bounds: tuple[jax.Array, jax.Array], saved: tuple[jax.Array, jax.Array, jax.Array], *,
    dtype: jax.typing.DTypeLike, architecture: Architecture,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Compute what `pallas_kernels.attention_backward` does, for the inputs that `attention_mosaic` supports.

    `bounds` is the result of this module's `backward_ranges`.
    """
    (b, _, h, c), num_kv = x.q_bshc.shape, x.k_btkc.shape[2]
    do, lse, delta = saved
    scores, products = (-jnp.swapaxes(start, 1, 2) for start in (lse * c**0.5, delta))
    refs = Refs.of(x, do, scores, products)

    def run(name: str, bounds: jax.Array, out: tuple[Any, ...], grid: tuple[int, ...]) -> Any:
        entry, of_keys = tile(name, architecture, x.q_bshc.dtype), name == KEYS
        (queries, keys), segmented = entry.sizes, x.query_segments_bs is not None
        kept = _side(COMPUTING, keys // COMPUTING if of_keys else queries, c, segmented, not of_keys)
        visited = _side(entry.stages, queries if of_keys else keys, c, segmented, of_keys)
        shared = _Shared(kept, visited, mosaic.barriers(entry.stages, COMPUTING))
        interpreted, arrays = mosaic.interpreted(architecture), (jnp.reshape(x.query_offset, (1,)), bounds, refs)
        kernel = functools.partial(_kernel, of_keys=of_keys, window=x.window, interpreted=interpreted)
        return mosaic.launch(name, kernel, arrays, out, shared, grid, architecture)

    of_keys, of_queries = (bound.shape[1] for bound in bounds)
    dk, dv = run(KEYS, bounds[0], (Out(x.k_btkc.shape, dtype),) * 2, (of_keys, b, num_kv))
    (dq,) = run(QUERIES, bounds[1], (Out(x.q_bshc.shape, dtype),), (of_queries, b, h // COMPUTING))
    return dq, dk, dv


def _side(number: int, tokens: int, c: int, segmented: bool, queries: bool) -> _Side:
    def vectors(exist: bool, dtype: jax.typing.DTypeLike) -> Any:
        return gpu.SMEM((number, tokens), dtype) if exist else None

    pair = mosaic.matrices(number, tokens, c), mosaic.matrices(number, tokens, c)
    starts = vectors(queries, jnp.float32), vectors(queries, jnp.float32)
    return _Side(*pair, vectors(segmented, jnp.int32), *starts, mosaic.barriers(number, 2 + segmented + 2 * queries))


def _copy(source: _Side, place: tuple[Any, Any, Any], target: _Side, slot: Any) -> None:
    """Copy the tile at a place (row of the batch, first token, head) to shared memory."""
    row, first, head = place
    tokens, copied = pl.ds(first, target.first.shape[1]), target.copied.at[slot]
    for array, copy in ((source.first, target.first), (source.second, target.second)):
        gpu.copy_gmem_to_smem(array.at[row, tokens, head], copy.at[slot], copied)
    if target.segments is not None:
        gpu.copy_gmem_to_smem(source.segments.at[row, tokens], target.segments.at[slot], copied)
    if target.scores is not None:
        for array, copy in ((source.scores, target.scores), (source.products, target.products)):
            gpu.copy_gmem_to_smem(array.at[row, head, tokens], copy.at[slot], copied)


def _kernel(
    offset_ref: Any, bounds_ref: Any, x: Refs, *refs: Any, of_keys: bool, window: int | None,
    interpreted: bool,
) -> None:  # fmt: skip
    gradient_refs, shared = refs[:-1], refs[-1]
    queries = _Side(x.q, x.do, x.query_segments, x.lse, x.delta)
    keys = _Side(x.k, x.v, x.key_segments, None, None)
    (size, c), (stages, tokens) = shared.kept.first.shape[1:], shared.visited.first.shape[:2]
    groups = queries.first.shape[2] // keys.first.shape[2]
    repeats = groups if of_keys else 1  # keys visit each tile of queries once for each head

    # Computed by each role for itself: what both use would take registers of the one that has few.
    def block() -> tuple[Any, Any, Any, Steps]:
        row, heads, index = (lax.axis_index(name) for name in ("row", "heads", "tile"))
        if not of_keys:
            index = bounds_ref.shape[1] - 1 - index  # longest blocks first: the last queries see the most keys
        return row, heads, index, Steps(*(bounds_ref[row, index, i] for i in range(4)))

    def copy() -> None:
        row, heads, _, steps = block()

        def step(i: Any, _: None) -> None:
            slot = lax.rem(i, stages)
            head = heads * groups + lax.rem(i, groups) if of_keys else heads * COMPUTING // groups
            pl.when(i >= stages)(lambda: gpu.barrier_wait(shared.read.at[slot]))
            _copy(queries if of_keys else keys, (row, steps.tile(i // repeats) * tokens, head), shared.visited, slot)

        lax.fori_loop(0, steps.visits * repeats, step, None)

    def compute(warpgroup: Any) -> None:
        row, heads, index, steps = block()
        first = (index * COMPUTING + warpgroup) * size if of_keys else index * size
        base = offset_ref[0] - first if of_keys else offset_ref[0] + first
        place = row, first, heads if of_keys else heads * COMPUTING + warpgroup
        _copy(keys if of_keys else queries, place, shared.kept, warpgroup)
        gpu.barrier_wait(shared.kept.copied.at[warpgroup])

        def step(i: Any, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            other = steps.tile(i // repeats) * tokens
            position = base + other if of_keys else base - other
            masked = i >= steps.unmasked * repeats
            # The shift yields 0. Because it depends on the step, ptxas does not keep the addresses of all parts of the
            # kept tiles in registers, which would not suffice.
            kept, visited = shared.kept.at(warpgroup + (i >> 30)), shared.visited.at(lax.rem(i, stages))
            gpu.barrier_wait(visited.copied)
            seen = functools.partial(mosaic.seen, (size, tokens), int(of_keys), position, window)
            state = _add_tile(kept, visited, masked, seen, interpreted, state)
            gpu.commit_smem()  # before a copy overwrites what was read
            gpu.barrier_arrive(shared.read.at[lax.rem(i, stages)])
            return state

        zeros = gpu.layout_cast(jnp.zeros((size, c), jnp.float32), mosaic.WHOLE)
        sums = lax.fori_loop(0, steps.visits * repeats, step, (zeros,) * len(gradient_refs))
        gradients = sums[0] * c**-0.5, *sums[1:]
        for ref, buffer, gradient in zip(gradient_refs, shared.kept.at(warpgroup), gradients, strict=False):
            mosaic.store(ref, (row, pl.ds(first, size), place[2]), buffer, gradient)

    mosaic.specialize(copy, compute)


def _add_tile(
    kept: _Side, visited: _Side, masked: Any, seen: Any, interpreted: bool, sums: tuple[jax.Array, ...]
) -> tuple[jax.Array, ...]:
    """Add a visited tile to the gradients of the first kept array and, if it has keys, the second.

    `seen` is `attention_mosaic_tiles.seen` but for the segments; it hides something only if the tile is `masked`.
    """
    shape, query_axis = (kept.first.shape[0], visited.first.shape[0]), int(kept.scores is None)
    queries = (kept, visited)[query_axis]
    scores, products = (mosaic.across(mosaic.load_vector(start, query_axis), shape, query_axis)
                        for start in (queries.scores, queries.products))  # fmt: skip

    def hide(scores: jax.Array) -> jax.Array:
        segments = [None if side.segments is None else mosaic.load_vector(side.segments, axis)
                    for axis, side in enumerate((kept, visited))]  # fmt: skip
        return jnp.where(seen(segments[query_axis], segments[1 - query_axis]), scores, HIDDEN)

    def multiply(scores: Any, products: Any, *sums: Any) -> None:
        mosaic.add_product(scores, kept.first, visited.first.transpose((1, 0)))
        mosaic.add_product(products, kept.second, visited.second.transpose((1, 0)))
        p = jnp.exp2(mosaic.load(scores, 1) * (LOG2_E * kept.first.shape[1] ** -0.5))
        if query_axis:
            mosaic.add_product(sums[1], p.astype(jnp.bfloat16), visited.second)
        ds = p * mosaic.load(products, query_axis)
        mosaic.add_product(sums[0], ds.astype(jnp.bfloat16), visited.first)

    scores = lax.cond(masked, hide, lambda scores: scores, scores)
    return mosaic.accumulate(multiply, (scores, products, *sums), interpreted)[2:]
