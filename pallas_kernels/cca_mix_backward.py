"""Gradients of the CCA mix in one kernel, which recomputes the forward pass from the projections.

There are two kinds of programs. The first kind has one head and many tokens, and sums the gradient of the grouped
convolution. The second kind has a tile of tokens for one key head and its query heads, and computes the gradients of
the projections. Both need the gradient of the convolutions' output; recomputing it is cheaper than writing and reading
it. Programs of the same tokens run one after another, so that the second kind reads from cache.

Rows of the halo are treated like others: time starts at minus their number.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.cca_mix import MixArrays, sizes_of, span, tap_row, with_none, without_none
from pallas_kernels.cca_mix_gradients import MixGradients
from pallas_kernels.cca_mix_heads import Head, Inputs, head_gradient
from pallas_kernels.cca_mix_tile import finish_tile, reach
from pallas_kernels.launch import launch
from pallas_kernels.product import product
from pallas_kernels.tiles import Architecture, tile

MOST_PARTS = 16  # partial sums of the grouped gradient, each written in fp32 (1.3 MB for the 8B)


class _Out(NamedTuple):
    """Outputs of the kernel; i counts tiles of tokens over the whole batch, j parts of all tokens."""

    packed_bsmc: jax.Array
    halo_u_bwnc: jax.Array | None
    halo_delayed_b1x: jax.Array | None
    depthwise_iwnc: jax.Array
    temperature_ik: jax.Array
    start_ix: jax.Array | None
    depthwise_bias_jnc: jax.Array
    grouped_jwncc: jax.Array
    grouped_bias_jnc: jax.Array


def cca_mix_backward(x: MixArrays, q_bshc: jax.Array, k_bskc: jax.Array, v_bskc: jax.Array, *,
                     architecture: Architecture) -> MixGradients:  # fmt: skip
    """Compute the gradients of the inputs of `cca_mix`.

    Args:
      x: inputs of `cca_mix`.
      q_bshc: gradient of the queries, in the dtype of u.
      k_bskc: gradient of the keys.
      v_bskc: gradient of the values.
      architecture: see `launch`.
    """
    b, s, n, num_kv, c, _, before = sizes_of(x)
    cut = tile("cca_mix_backward", architecture, x.packed_bsmc.dtype)
    tokens, depth, tokens_summed, depth_summed, taps, tokens_of_part = cut.sizes
    tiles = pl.cdiv(s + before, tokens - reach(x))
    parts = max(1, min(MOST_PARTS, b * s // tokens_of_part))
    tiles_of_part = pl.cdiv(b * tiles * num_kv, parts)

    def summed_over(like: jax.Array | None, count: int) -> jax.ShapeDtypeStruct | None:
        return None if like is None else jax.ShapeDtypeStruct((count, *like.shape), jnp.float32)

    alike = x.packed_bsmc, x.halo_u_bwnc, x.halo_delayed_b1x
    of_tiles = x.depthwise_wnc, x.temperature_k, x.start_x
    of_parts = x.depthwise_bias_nc, x.grouped_wncc, x.grouped_bias_nc
    shapes, made = without_none((
        *(None if a is None else jax.ShapeDtypeStruct(a.shape, a.dtype) for a in alike),
        *(summed_over(a, b * tiles) for a in of_tiles), *(summed_over(a, parts) for a in of_parts),
    ))  # fmt: skip
    arrays, present = without_none(x)
    results = launch(
        functools.partial(_kernel, present=(present, made), sizes=(tokens, min(depth, c)), tiles=tiles,
                          summed=(tokens_summed, min(depth_summed, c), min(taps, x.grouped_wncc.shape[0]))),
        *arrays, q_bshc, k_bskc, v_bskc,
        name="cca_mix_backward",
        grid=(n * pl.cdiv(x.grouped_wncc.shape[0], taps) + tiles_of_part, parts),
        out_shape=shapes,
        warps=cut.warps,
        stages=cut.stages,
        architecture=architecture,
    )  # fmt: skip
    out = with_none(_Out, made, iter(results))
    # Few large parts: add them elementwise, so that XLA fuses the cast into the same pass.
    grouped = functools.reduce(jnp.add, (out.grouped_jwncc[part] for part in range(parts)))
    return MixGradients(
        out.packed_bsmc, out.halo_u_bwnc, out.halo_delayed_b1x, out.depthwise_iwnc.sum(0),
        out.depthwise_bias_jnc.sum(0), grouped, out.grouped_bias_jnc.sum(0), out.temperature_ik.sum(0),
        None if out.start_ix is None else out.start_ix.sum(0),
    )  # fmt: skip


def _kernel(*refs: Any, present: tuple[tuple[bool, ...], tuple[bool, ...]], sizes: tuple[int, int],
            summed: tuple[int, int, int], tiles: int) -> None:  # fmt: skip
    rest = iter(refs)
    inputs = Inputs(with_none(MixArrays, present[0], rest), next(rest), next(rest), next(rest))
    out = with_none(_Out, present[1], rest)
    whole = sizes_of(inputs.x)
    b, n, num_kv = whole.batch, whole.heads, whole.kv_heads
    own, part = pl.program_id(0), pl.program_id(1)
    # The programs that sum run longest, so they go first.
    sums = n * pl.cdiv(inputs.x.grouped_wncc.shape[0], summed[-1])
    head, first = jax.lax.rem(own, n), jax.lax.div(own, n) * summed[-1]
    number = own - sums + part * (pl.num_programs(0) - sums)

    @pl.when((own < sums) & (head < n - num_kv))
    def _() -> None:
        _sum_grouped(inputs, out, inputs.query(head), first, part, *summed)

    @pl.when((own < sums) & (head >= n - num_kv))
    def _() -> None:
        _sum_grouped(inputs, out, inputs.key(head - (n - num_kv)), first, part, *summed)

    @pl.when((own >= sums) & (number < b * tiles * num_kv))
    def _() -> None:
        group, which = jax.lax.rem(number, num_kv), jax.lax.div(number, num_kv)
        finish_tile(inputs, out, group, which, *sizes, tiles=tiles)


def _sum_grouped(inputs: Inputs, out: Any, head: Head, first: jax.Array, part: jax.Array, tokens: int, depth: int,
                 count: int) -> None:  # fmt: skip
    """Sum the gradients of some taps of a head's grouped convolution, and of both biases, over a part of the tokens."""
    x = inputs.x
    b, s, c = x.packed_bsmc.shape[0], x.packed_bsmc.shape[1], x.packed_bsmc.shape[3]
    last, channels = x.grouped_wncc.shape[0] - 1, span(0, c)
    taps = [jnp.minimum(first + i, last) for i in range(count)]  # `count` may exceed what is left
    in_row = pl.cdiv(s, tokens)
    each = pl.cdiv(b * in_row, out.grouped_jwncc.shape[0])

    def step(i: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        batch = jax.lax.div(i, in_row)
        time = jax.lax.rem(i, in_row) * tokens + span(0, tokens)
        z, _ = head_gradient(x, head, batch, time, depth, unroll=depth == c)
        rows = (tap_row(x, batch, time, head.number, channels, last - tap) for tap in taps)
        grouped = (total + product(row, z, (0, 0)) for total, row in zip(sums[:-1], rows, strict=True))
        return *grouped, sums[-1] + jnp.sum(z.astype(jnp.float32), axis=0)

    zeros = *(jnp.zeros((c, c), jnp.float32) for _ in taps), jnp.zeros((c,), jnp.float32)
    *grouped, bias = jax.lax.fori_loop(part * each, jnp.minimum((part + 1) * each, b * in_row), step, zeros)
    for tap, total in zip(taps, grouped, strict=True):
        triton.store(out.grouped_jwncc.at[part, tap, head.number, channels[:, None], channels[None, :]], total)

    @pl.when(first == 0)
    def _() -> None:
        triton.store(out.grouped_bias_jnc.at[part, head.number, channels], bias)
        # The depthwise bias reaches every token through all taps, also across document boundaries.
        through = jnp.zeros((c,), jnp.float32)
        for tap in range(last + 1):
            kernel = triton.load(x.grouped_wncc.at[tap, head.number, channels[:, None], channels[None, :]])
            through += jnp.sum(kernel.astype(jnp.float32) * bias[None, :], axis=1)
        triton.store(out.depthwise_bias_jnc.at[part, head.number, channels], through)
