"""The CCA mix of one token of each row of a batch, which also advances the decode state in place, in one launch.

A program computes a head, or the value of a key head, for a tile of rows. It alone reads and writes its head's part of
the state. Rows are independent: products, norms and means reduce over the channels of one row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.cca_mix import MixArrays, filled, rows_at, shifted_value, sizes_of, span
from pallas_kernels.cca_mix_by_head import mixed_head
from pallas_kernels.launch import Out, launch, load, store
from pallas_kernels.tiles import Architecture, architecture_name, tile


def cca_mix_step(
    x: MixArrays, k_btx: jax.Array, v_btx: jax.Array, slot_b: jax.Array, *, architecture: Architecture
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Compute `cca_mix` for one token a row, with a halo of at least one row, whose arrays are fp32.

    Returns the queries [b, 1, h, c]; and in place, keys and values with the new ones in slot `slot_b`, int32, if the
    cache has it, and both arrays of the halo, advanced by the token unless its document is 0.
    """
    (b, _, n, num_kv, c, *_), dtype = sizes_of(x), x.packed_bsmc.dtype
    cut = tile("cca_mix_step", architecture, dtype)
    kept: tuple[Any, ...] = (k_btx, v_btx, x.halo_u_bwnc, x.halo_delayed_b1x)
    out = Out((b, 1, n - num_kv, c), dtype), tuple(Out(array.shape, array.dtype) for array in kept)
    kernel = functools.partial(_kernel, depth=min(cut.sizes[1], c), rows=cut.sizes[0], architecture=architecture)
    first = len(jax.tree.leaves(x))
    aliases, grid = {first: 1, first + 1: 2, 1: 3, 2: 4}, (n + num_kv, pl.cdiv(b, cut.sizes[0]))
    return launch("cca_mix_step", kernel, (x, k_btx, v_btx, slot_b), out, grid, cut, architecture, aliases)


def _kernel(
    x: Any, _k: Any, _v: Any, slot_ref: Any, q_ref: Any, kept: Any, *, rows: int, depth: int, architecture: Architecture
) -> None:
    (b, _tokens, n, num_kv, c, half, _halo), (k_ref, v_ref, u_ref, delayed_ref) = sizes_of(x), kept
    head, row, channel = pl.program_id(0), pl.program_id(1) * rows + span(0, rows), span(0, c)
    # Rows past the end read the last one, and write nothing.
    batch, now, inside = jnp.minimum(row, b - 1), jnp.zeros_like(row), row < b
    slot = load(slot_ref.at[row], mask=inside, other=k_ref.shape[1])
    # All threads load before one of them overwrites what others load.
    barrier = triton.debug_barrier if architecture_name(architecture) != "interpret" else (lambda: None)
    written = inside & (slot >= 0) & (slot < k_ref.shape[1])
    advances = inside & (load(x.segments_bs.at[batch, now]) != 0)

    def write(ref: Any, at: tuple[Any, ...], value: jax.Array, mask: jax.Array) -> None:
        mask = filled(mask if mask.ndim == 2 else mask[:, None], *value.shape)
        store(ref.at[row[:, None], *at], value.astype(ref.dtype), mask=mask)

    @pl.when(head < n)
    def _() -> None:
        turned, _ = mixed_head(x, batch, now, head, depth)
        # The state one token later: the rows before, then this token's.
        later = [rows_at(x, batch, now - back, head, channel) for back in range(u_ref.shape[1])]
        query, first = head < n - num_kv, jnp.maximum(head - (n - num_kv), 0) * c
        barrier()
        for column, part in turned:
            write(q_ref, (0, jnp.where(query, head, 0), column[None, :]), part, inside & query)
            write(k_ref, (slot[:, None], first + column[None, :]), part, written & ~query)
        for back, values in enumerate(later):
            write(u_ref, (u_ref.shape[1] - 1 - back, head, channel[None, :]), values, advances)

    @pl.when(head >= n)
    def _() -> None:
        at = (head - n) * c + channel
        value = shifted_value(x, batch, now, head - n)
        delayed = load(x.packed_bsmc.at[batch[:, None], 0, head, channel[None, :]])
        barrier()
        write(v_ref, (slot[:, None], at[None, :]), value, written)
        place, late = jnp.maximum(at - half, 0), (at >= half)[None, :]
        write(delayed_ref, (0, place[None, :]), delayed, advances[:, None] & late)
