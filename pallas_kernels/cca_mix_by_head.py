"""The forward pass of the CCA mix with a program for each head of a tile of tokens.

Programs of the same tokens run together: projections are read from memory once, and again from cache by the taps and by
QK-mean, which couples heads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import cca_mix as mix
from pallas_kernels.cca_mix import MixArrays, filled, rows_at, sizes_of, span
from pallas_kernels.launch import store
from pallas_kernels.tiles import Architecture


def cca_mix_by_head(x: MixArrays, *, architecture: Architecture) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Compute `cca_mix` with a program for each head; arguments and results are the same."""
    return mix.launch_mix("cca_mix_by_head", _kernel, x, x.packed_bsmc.shape[2], architecture)


def _kernel(x: Any, q_ref: Any, k_ref: Any, v_ref: Any, inverse_ref: Any, *, tokens: int, depth: int) -> None:
    (_b, s, n, num_kv, *_rest), head, batch = sizes_of(x), pl.program_id(0), pl.program_id(2)
    time = pl.program_id(1) * tokens + span(0, tokens)

    @pl.when(head < n)
    def _() -> None:
        inside, query, group = time < s, head < n - num_kv, jnp.maximum(head - (n - num_kv), 0)
        turned, inverse = mixed_head(x, batch, time, head, depth)
        store(inverse_ref.at[batch, head, time], inverse, mask=inside)
        for column, part in turned:
            for ref, number, own_kind in ((q_ref, jnp.where(query, head, 0), query), (k_ref, group, ~query)):
                at, values = ref.at[batch, time[:, None], number, column[None, :]], part.astype(ref.dtype)
                store(at, values, mask=filled((inside & own_kind)[:, None], *part.shape))

    @pl.when(head >= n)
    def _() -> None:
        mix.shift_value(x, v_ref, batch, time, head - n)


def mixed_head(
    x: Any, batch: jax.Array, time: jax.Array, head: jax.Array, depth: int
) -> tuple[list[tuple[jax.Array, jax.Array]], jax.Array]:
    """Compute a head of queries or keys; returns ranges of channels with their fp32 values, and the inverse norm.

    `batch` is the row of all tokens, or int32 [tokens], the row of each.
    """
    _, s, n, num_kv, c, *_ = sizes_of(x)
    query, group = head < n - num_kv, jnp.maximum(head - (n - num_kv), 0)
    columns = mix.rotary_columns(c, x.cos_bsp.shape[2])
    parts = mix.convolved(x, batch, time, head, columns, depth)
    # Loaded after the matmul, since registers cannot hold them: 0.5 of the head, and of the mean of its partners.
    first, count = partners(head, n - num_kv, num_kv)
    share = 0.5 / count.astype(jnp.float32)

    def add(i: jax.Array, parts: list[jax.Array]) -> list[jax.Array]:
        rows = (rows_at(x, batch, time, first + i, column) for column in columns)
        return [part + row * share for part, row in zip(parts, rows, strict=True)]

    own = [rows_at(x, batch, time, head, column) for column in columns]
    parts = jax.lax.fori_loop(0, count, add, [part + 0.5 * row for part, row in zip(parts, own, strict=True)])
    inverse = jax.lax.rsqrt(sum(jnp.sum(part * part, axis=1) for part in parts) + 1e-12)
    scale = c**0.5 * jnp.where(query, 1.0, mix.temperature(x.temperature_k, group))
    tables = mix.rotary_rows((x.cos_bsp, x.sin_bsp), batch, time, time < s)
    turned = mix.rotated([part * (inverse * scale)[:, None] for part in parts], *tables)
    return list(zip(columns, turned, strict=True)), inverse


def partners(head: jax.Array, queries: int, num_kv: int) -> tuple[jax.Array, jax.Array]:
    """Return first and number of the heads that QK-mean averages with `head`: a query's key, or a key's queries."""
    served, query = queries // num_kv, head < queries
    first = jnp.where(query, queries + jax.lax.div(head, served), (head - queries) * served)
    return first, jnp.where(query, 1, jnp.int32(served))  # of two weak types, Triton's lowering would make bools
