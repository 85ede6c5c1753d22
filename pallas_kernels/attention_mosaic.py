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

from pallas_kernels import attention_tiles as tiles
from pallas_kernels.attention_tiles import FLOOR, HIDDEN, LN_2, LOG2_E, AttentionInputs, Refs
from pallas_kernels.launch import Out
from pallas_kernels.tiles import Architecture, architecture_name, tile

_HEADS = 2  # query heads of a block, one for each warpgroup that computes
# A warpgroup that copies gives registers to the others: of each thread, 65,536 / 128 for the three.
_COPY_REGISTERS, _COMPUTE_REGISTERS = 40, 232
_ACCUMULATOR: Any = gpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_INTERPRETER: Any = getattr(gpu, "InterpretGPUParams", None)  # None before jax 0.11
_WHOLE = gpu.Layout.WGMMA  # the registers that hold a tile of scores or of the output
_BY_ROW, _BY_COLUMN = _WHOLE.reduce(1), _WHOLE.reduce(0)  # and those of a vector with an element for each row or column


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


class _Steps(NamedTuple):
    """The tiles of keys that a block visits, in this order: those without a mask, those before and those after them."""

    low: Any  # of `attention_tiles.ranges`, like the next three
    start: Any
    stop: Any
    high: Any

    @property
    def unmasked(self) -> Any:
        """Number of tiles without a mask."""
        return self.stop - self.start

    @property
    def visits(self) -> Any:
        """Number of all tiles."""
        return self.high - self.low

    def tile(self, step: Any) -> Any:
        """Return the tile of a step."""
        masked = step - self.unmasked
        return jnp.where(
            masked < 0, self.start + step, self.low + jnp.where(masked < self.start - self.low, masked, step)
        )


def attention_forward(
    x: AttentionInputs, *, dtype: jax.typing.DTypeLike, architecture: Architecture
) -> tuple[jax.Array, jax.Array]:
    """Compute `attention.attention_forward` on sm_90, in bfloat16, for heads of 64 or 128 channels.

    The number of query heads per key head is even, and queries and keys are whole tiles.
    """
    (b, s, h, c), num_kv = x.q_bshc.shape, x.k_btkc.shape[2]
    entry = tile("attention_mosaic", architecture, x.q_bshc.dtype)
    queries, keys = entry.sizes
    interpreted = architecture_name(architecture) == "interpret"
    call = gpu.kernel(
        functools.partial(_kernel, window=x.window, interpreted=interpreted),
        out_type=(Out((b, s, h, c), dtype), Out((b, h, s), jnp.float32)),
        scratch_types=[_shared(queries, keys, entry.stages, c, x.query_segments_bs is not None)],
        grid=(s // queries, b, h // _HEADS),  # the last axis varies fastest: those that share keys run together
        grid_names=("tile", "row", "heads"),
        num_threads=_HEADS + 1,
        thread_name="warpgroup",
        kernel_name="attention_mosaic",
        compiler_params=gpu.CompilerParams(approx_math=True, lowering_semantics=gpu.LoweringSemantics.Warpgroup),
        interpret=_INTERPRETER(detect_races=True) if interpreted else None,
    )
    bounds = tiles.ranges(x, (queries * (h // num_kv), keys))
    o, lse_bhs = jax.jit(call)(jnp.reshape(x.query_offset, (1,)), bounds, Refs.of(x))
    return o, lse_bhs.transpose(0, 2, 1)


def _shared(queries: int, keys: int, stages: int, c: int, segmented: bool) -> _Shared:
    def matrices(*sizes: int) -> Any:
        """Lay out matrices as the tensor cores read them, in tiles with rows of 128 bytes."""
        return gpu.SMEM(sizes, jnp.bfloat16, transforms=(gpu.TilingTransform((8, 64)), gpu.SwizzleTransform(128)))

    def barrier(number: int, arrivals: int) -> Any:
        return gpu.Barrier(num_barriers=number, num_arrivals=arrivals)

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
    row, heads, warpgroup = (lax.axis_index(name) for name in ("row", "heads", "warpgroup"))
    index = bounds_ref.shape[1] - 1 - lax.axis_index("tile")  # longest blocks first: the last rows see the most keys
    steps = _Steps(*(bounds_ref[row, index, i] for i in range(4)))

    @pl.when(warpgroup == _HEADS)
    def _() -> None:
        gpu.set_max_registers(_COPY_REGISTERS, action="decrease")
        key_head = heads * _HEADS // (x.q.shape[2] // x.k.shape[2])
        lax.fori_loop(0, steps.visits, lambda i, _: _copy_keys(x, shared, (row, key_head), i, steps.tile(i)), None)

    @pl.when(warpgroup < _HEADS)
    def _() -> None:
        gpu.set_max_registers(_COMPUTE_REGISTERS, action="increase")
        queries, c = shared.q.shape[1:]
        at = row, pl.ds(index * queries, queries), heads * _HEADS + warpgroup
        rows = _copy_rows(x, shared, at, warpgroup, index * queries + offset_ref[0])

        def step(i: Any, state: State, masked: bool) -> State:
            first = steps.tile(i) * shared.k.shape[1]
            seen = functools.partial(_seen, rows, first, window) if masked else None
            return _attend(shared, warpgroup, lax.rem(i, shared.k.shape[0]), seen, interpreted, state)

        top, total = (gpu.layout_cast(jnp.full((queries,), value, jnp.float32), _BY_ROW) for value in (FLOOR, 0))
        state = top, total, gpu.layout_cast(jnp.zeros((queries, c), jnp.float32), _WHOLE)
        pl.when(warpgroup == 1)(lambda: _change_places(shared))  # it is half a step behind the other
        state = lax.fori_loop(0, steps.unmasked, functools.partial(step, masked=False), state)
        top, total, acc = lax.fori_loop(steps.unmasked, steps.visits, functools.partial(step, masked=True), state)
        pl.when(warpgroup == 0)(lambda: _change_places(shared))
        safe = jnp.where(total == 0, 1.0, total)
        lse_ref[at[0], at[2], at[1]] = jnp.where(total == 0, FLOOR, top * LN_2 + jnp.log(safe))
        acc = (acc * _across(1 / safe, acc.shape)).astype(o_ref.dtype)
        if o_ref.dtype == jnp.float32:
            o_ref[at] = acc
        else:
            o = shared.q.at[warpgroup]
            o[...] = acc
            gpu.commit_smem()
            gpu.copy_smem_to_gmem(o, o_ref.at[at])
            gpu.wait_smem_to_gmem(0)


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


class _Rows(NamedTuple):
    """The queries of a block: int32 [queries]."""

    position: Any  # index among the keys
    last: Any  # index of the last key that it may see, -1 for padding
    segment: Any  # document; None without documents


def _copy_rows(x: Refs, shared: _Shared, at: tuple[Any, ...], warpgroup: Any, position: Any) -> _Rows:
    """Copy the queries of a head, the first of which is at a position among the keys."""
    copied, segment = shared.q_copied.at[warpgroup], None
    gpu.copy_gmem_to_smem(x.q.at[at], shared.q.at[warpgroup], copied)
    if x.query_segments is not None:
        gpu.copy_gmem_to_smem(x.query_segments.at[at[:2]], shared.query_segments.at[warpgroup], copied)
    gpu.barrier_wait(copied)
    last = positions = position + gpu.broadcasted_iota(jnp.int32, shared.q.shape[1:2], 0, layout=_BY_ROW)
    if x.query_segments is not None:
        segment = gpu.layout_cast(shared.query_segments[warpgroup], _BY_ROW)
        last = jnp.where(segment != 0, positions, -1)
    return _Rows(positions, last, segment)


def _seen(rows: _Rows, first_key: Any, window: int | None, key_segment: jax.Array | None, shape: Any) -> jax.Array:
    """Return the mask of the keys of a tile that each query sees, bool [queries, keys]."""
    key = gpu.broadcasted_iota(jnp.int32, shape, 1, layout=_WHOLE)
    mask = key <= _across(rows.last - first_key, shape)
    if window is not None:
        mask &= key > _across(rows.position - first_key - window, shape)
    if key_segment is not None:
        mask &= lax.broadcast_in_dim(key_segment, shape, [1]) == _across(rows.segment, shape)
    return mask


State = tuple[jax.Array, jax.Array, jax.Array]  # as of `attention.attend`


def _attend(shared: _Shared, warpgroup: Any, slot: Any, seen: Any, interpreted: bool, state: State) -> State:
    """Update the state of a head with the tile of keys in `slot`, of which it sees all without `seen`."""
    top, total, acc = state

    def multiply(ref: Any) -> jax.Array:
        gpu.wgmma(ref, shared.q.at[warpgroup], shared.k.at[slot].transpose((1, 0)))
        _change_places(shared)  # the other's products queue up behind these
        return ref[...]

    gpu.barrier_wait(shared.k_copied.at[slot])
    scores = pl.run_scoped(multiply, _ACCUMULATOR((acc.shape[0], shared.k.shape[1]), jnp.float32))
    key_segment = None
    if seen is not None and shared.key_segments is not None:
        key_segment = gpu.layout_cast(shared.key_segments[slot], _BY_COLUMN)
        gpu.commit_smem()  # before a copy overwrites what was read
    gpu.barrier_arrive(shared.k_read.at[slot])
    if seen is not None:
        scores = jnp.where(seen(key_segment, scores.shape), scores, HIDDEN)
    scale = LOG2_E * acc.shape[1] ** -0.5
    new_top = jnp.maximum(top, scores.max(1) * scale)
    p = jnp.exp2(scores * scale - _across(new_top, scores.shape))
    keep = jnp.exp2(top - new_top)
    total, acc, rounded = total * keep + p.sum(1), acc * _across(keep, acc.shape), p.astype(jnp.bfloat16)
    _change_places(shared)
    gpu.barrier_wait(shared.v_copied.at[slot])
    acc = _add_product(acc, rounded, shared.v.at[slot], interpreted)
    gpu.barrier_arrive(shared.v_read.at[slot])
    return new_top, total, acc


def _change_places(shared: _Shared) -> None:
    gpu.barrier_arrive(shared.turn)
    gpu.barrier_wait(shared.turn)


def _across(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Repeat an element for each row across the columns."""
    return lax.broadcast_in_dim(x, shape, [0])


def _add_product(acc: jax.Array, a: jax.Array, b_ref: Any, interpreted: bool) -> jax.Array:
    """Return acc + a @ b, with `a` in registers and `b` in shared memory."""
    if not interpreted:
        return pl.run_state(lambda ref: gpu.wgmma(ref, a, b_ref))(_ACCUMULATOR.init(acc))
    b = b_ref[...]  # the interpreter has no products of registers
    gpu.commit_smem()
    return acc + jnp.dot(a, b, preferred_element_type=jnp.float32)
