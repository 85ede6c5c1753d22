"""The reference implementations of attention: blocks of keys with an online softmax, forward and backward.

Memory is linear in the sequence length. Blocks that causality or the window hides are skipped. Arrays are folded:
padded to whole blocks, heads before the sequence, query heads grouped by key head.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention_tiles import AttentionInputs
from zaya_jax.ops.names import MATMUL_OUTPUT
from zaya_jax.ops.precision import accumulation_dtype

# HIDDEN is added to the scores of hidden keys. The running maximum starts at FLOOR, which is above it and far below
# every real score, so that a row without visible keys gives 0 and not NaN.
HIDDEN = -1e30
FLOOR = -1e20
QUERY_BLOCK = 128
KEY_BLOCK = 256
MAX_QUERIES = 4  # queries up to which `few_queries` is faster, which does not skip blocks of hidden keys


class Blocks(NamedTuple):
    """Static values of the loops over blocks."""

    q_block: int
    k_block: int
    window: int | None
    keys: int  # without padding


class Folded(NamedTuple):
    """The inputs, padded to whole blocks."""

    q: jax.Array  # [b, k, h / k, s, c]
    k: jax.Array  # [b, k, t, c]
    v: jax.Array
    q_seg: Any  # [b, s]
    k_seg: Any  # [b, t]
    offset: Any


def fold(x: AttentionInputs) -> tuple[Blocks, Folded]:
    """Pad to whole blocks, move heads before the sequence, and group query heads by key head."""
    (_, s, _, _), (_, t, num_kv, _) = x.q_bshc.shape, x.k_btkc.shape
    blocks = Blocks(min(QUERY_BLOCK, s), min(KEY_BLOCK, t), x.window, t)
    s_pad, t_pad = -s % blocks.q_block, -t % blocks.k_block
    q = fold_queries(x.q_bshc, num_kv, s + s_pad)
    k, v = (jnp.pad(array.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, t_pad), (0, 0)))
            for array in (x.k_btkc, x.v_btkc))  # fmt: skip
    segments = ((x.query_segments_bs, s_pad), (x.key_segments_bt, t_pad))
    q_seg, k_seg = (jnp.pad(array, ((0, 0), (0, pad))) for array, pad in segments)
    return blocks, Folded(q, k, v, q_seg, k_seg, jnp.asarray(x.query_offset, jnp.int32))


def fold_queries(x_bshc: jax.Array, num_kv: int, length: int) -> jax.Array:
    """Reshape [b, s, h, c] to [b, k, h / k, length, c], padded with zeros."""
    b, s, h, c = x_bshc.shape
    x_bkgsc = x_bshc.reshape(b, s, num_kv, h // num_kv, c).transpose(0, 2, 3, 1, 4)
    return jnp.pad(x_bkgsc, ((0, 0), (0, 0), (0, 0), (0, length - s), (0, 0)))


def unfold(x_bkgsc: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Undo `fold_queries`; returns an array of `shape`."""
    return x_bkgsc[:, :, :, : shape[1]].transpose(0, 3, 1, 2, 4).reshape(shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def blockwise(blocks: Blocks, x: Folded) -> jax.Array:
    """Compute attention on folded arrays, in the dtype of the queries."""
    return forward(blocks, x)[0].astype(x.q.dtype)


def _key_range(blocks: Blocks, first_query: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the key blocks [low, high) that queries of the block starting at `first_query` may see."""
    q_block, k_block, window, keys = blocks
    high = jnp.minimum((first_query + q_block + k_block - 1) // k_block, -(-keys // k_block))
    low = jnp.zeros_like(high) if window is None else jnp.maximum(first_query - window + 1, 0) // k_block
    return low, high


def _mask(
    blocks: Blocks, q_seg: jax.Array, k_seg: jax.Array, first_query: jax.Array, keys_first: bool, index: jax.Array
) -> jax.Array:
    """Mask key block `index`: 0 where a query sees a key, else HIDDEN, fp32 [b, 1, 1, x, y] or [b, 1, y, 1, x].

    Loops over key blocks carry the mask of the next block, so that it is materialized once. Computed in place, the
    compiler would fuse it into every consumer and recompute it for each element.
    """
    q_block, k_block, window, _ = blocks
    query = first_query + jnp.arange(q_block)
    key = index * k_block + jnp.arange(k_block)
    k_seg = _slice(k_seg, index * k_block, k_block, 1)
    if keys_first:
        query, key, q_seg, k_seg = query[None, :], key[:, None], q_seg[:, None, :], k_seg[:, :, None]
    else:
        query, key, q_seg, k_seg = query[:, None], key[None, :], q_seg[:, :, None], k_seg[:, None, :]
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    mask = jnp.where(seen & (q_seg == k_seg) & (q_seg != 0), 0.0, HIDDEN)
    return jnp.expand_dims(mask, (1, 3) if keys_first else (1, 2))


def _slice(x: jax.Array, start: jax.Array, size: int, axis: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def forward(blocks: Blocks, x: Folded) -> tuple[jax.Array, jax.Array]:
    """Return the output, and the log-sum-exp of each query, both in fp32 (float64 for float64 inputs)."""
    q_block, k_block, _, _ = blocks
    q, k, v, *_ = x
    b, kv, g, s, c = q.shape
    scale, sums = c**-0.5, accumulation_dtype(q.dtype)

    def per_query_block(_: None, index: jax.Array) -> tuple[None, tuple[jax.Array, jax.Array]]:
        first = index * q_block
        q_blk = _slice(q, first, q_block, 3) * scale
        q_seg = _slice(x.q_seg, first, q_block, 1)
        mask = functools.partial(_mask, blocks, q_seg, x.k_seg, first + x.offset, False)

        def per_key_block(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            high, total, acc, hidden = state
            start = j * k_block
            scores = jnp.einsum("bkgxc,bkyc->bkgxy", q_blk, _slice(k, start, k_block, 2), preferred_element_type=sums)
            scores = scores + hidden
            new_high = jnp.maximum(high, scores.max(-1))
            p = jnp.exp(scores - new_high[..., None])
            keep = jnp.exp(high - new_high)
            update = jnp.einsum("bkgxy,bkyc->bkgxc", p.astype(v.dtype), _slice(v, start, k_block, 2),
                                preferred_element_type=sums)  # fmt: skip
            return new_high, total * keep + p.sum(-1), acc * keep[..., None] + update, mask(j + 1)

        low, high = _key_range(blocks, first + x.offset)
        state = (
            jnp.full((b, kv, g, q_block), FLOOR, sums),
            jnp.zeros((b, kv, g, q_block), sums),
            jnp.zeros((b, kv, g, q_block, c), sums),
            mask(low),
        )
        top, total, acc, _ = jax.lax.fori_loop(low, high, per_key_block, state)
        safe = jnp.where(total == 0, 1.0, total)
        return None, (acc / safe[..., None], top + jnp.log(safe))

    _, (o, lse) = jax.lax.scan(per_query_block, None, jnp.arange(s // q_block))
    o = jnp.moveaxis(o, 0, 3).reshape(b, kv, g, s, c)
    return o, jnp.moveaxis(lse, 0, 3).reshape(b, kv, g, s)


def _forward_rule(blocks: Blocks, x: Folded) -> tuple[jax.Array, Any]:
    o, lse = forward(blocks, x)
    o, lse = checkpoint_name(o.astype(x.q.dtype), MATMUL_OUTPUT), checkpoint_name(lse, MATMUL_OUTPUT)
    return o, (x, o, lse)


def _backward_rule(blocks: Blocks, saved: Any, do: jax.Array) -> tuple[Folded]:
    x, o, lse = saved
    dq, dk, dv = (g.astype(x.q.dtype) for g in backward(blocks, x, o, lse, do))
    return (Folded(dq, dk, dv, None, None, None),)  # None means zero


def backward(
    blocks: Blocks, x: Folded, o: jax.Array, lse: jax.Array, do: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of queries, keys and values, in fp32, from the results of `forward` and their gradient."""
    q_block, k_block, _, _ = blocks
    q, k, v, *_ = x
    b, kv, g, s, c = q.shape
    scale, sums = c**-0.5, accumulation_dtype(q.dtype)
    delta = (do.astype(sums) * o.astype(sums)).sum(-1)
    k_bkct = k.swapaxes(2, 3)

    def per_query_block(state: tuple[jax.Array, jax.Array], index: jax.Array) -> tuple[Any, jax.Array]:
        first = index * q_block
        q_blk = _slice(q, first, q_block, 3) * scale
        do_blk = _slice(do, first, q_block, 3)
        lse_blk = _slice(lse, first, q_block, 3)[:, :, None]
        delta_blk = _slice(delta, first, q_block, 3)[:, :, None]
        q_seg = _slice(x.q_seg, first, q_block, 1)
        mask = functools.partial(_mask, blocks, q_seg, x.k_seg, first + x.offset, True)

        def per_key_block(j: jax.Array, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dq, dk, dv, hidden = state
            start = j * k_block
            k_blk, v_blk = _slice(k, start, k_block, 2), _slice(v, start, k_block, 2)
            # Scores with keys first, and dq with channels first, so that no matmul transposes a block of scores.
            scores = jnp.einsum("bkyc,bkgxc->bkygx", k_blk, q_blk, preferred_element_type=sums)
            p = jnp.exp(scores + hidden - lse_blk)
            dp = jnp.einsum("bkyc,bkgxc->bkygx", v_blk, do_blk, preferred_element_type=sums)
            ds = (p * (dp - delta_blk)).astype(q.dtype)
            dv_blk = jnp.einsum("bkygx,bkgxc->bkyc", p.astype(do.dtype), do_blk, preferred_element_type=sums)
            dk_blk = jnp.einsum("bkygx,bkgxc->bkyc", ds, q_blk, preferred_element_type=sums)
            dq = dq + jnp.einsum("bkcy,bkygx->bkcgx", _slice(k_bkct, start, k_block, 3), ds,
                                preferred_element_type=sums)  # fmt: skip
            return dq, _add_at(dk, dk_blk, start), _add_at(dv, dv_blk, start), mask(j + 1)

        low, high = _key_range(blocks, first + x.offset)
        dq = jnp.zeros((b, kv, c, g, q_block), sums)
        dq, dk, dv, _ = jax.lax.fori_loop(low, high, per_key_block, (dq, *state, mask(low)))
        return (dk, dv), (dq * scale).transpose(0, 1, 3, 4, 2)

    zeros = (jnp.zeros(k.shape, sums), jnp.zeros(v.shape, sums))
    (dk, dv), dq = jax.lax.scan(per_query_block, zeros, jnp.arange(s // q_block))
    return jnp.moveaxis(dq, 0, 3).reshape(b, kv, g, s, c), dk, dv


def _add_at(total: jax.Array, part: jax.Array, start: jax.Array) -> jax.Array:
    old = _slice(total, start, part.shape[2], 2)
    return jax.lax.dynamic_update_slice_in_dim(total, old + part, start, 2)


blockwise.defvjp(_forward_rule, _backward_rule)


def few_queries(x: AttentionInputs) -> tuple[jax.Array, jax.Array]:
    """Compute attention of the few queries of a decode step with one softmax over all keys.

    Each key is read once, where it is in the cache. Every query is multiplied by the keys of all heads, with zeros for
    the heads of others. That is num_kv times the FLOPs, but a step is limited by reading the cache, and a product for
    each head would transpose the cache first. Returns the output [b, s, h, c] and the log-sum-exp of each query [b, s,
    h] (`FLOOR` if it sees no key), in fp32 (float64 for float64 inputs).
    """
    q_bshc, k_btkc, v_btkc = x.q_bshc, x.k_btkc, x.v_btkc
    b, s, h, c = q_bshc.shape
    t, num_kv = k_btkc.shape[1:3]
    sums = accumulation_dtype(q_bshc.dtype)
    own_kj = jnp.eye(num_kv, dtype=q_bshc.dtype)
    q_bskgc = (q_bshc * c**-0.5).reshape(b, s, num_kv, h // num_kv, c)
    q_bxz = jnp.einsum("bskgc,kj->bskgjc", q_bskgc, own_kj).reshape(b, s * h, num_kv * c)
    scores_bxt = jnp.einsum("bxz,btz->bxt", q_bxz, k_btkc.reshape(b, t, num_kv * c), preferred_element_type=sums)
    query, key = jnp.reshape(x.query_offset, (-1, 1, 1)) + jnp.arange(s)[:, None], jnp.arange(t)
    seen = key <= query
    if x.window is not None:
        seen &= key > query - x.window
    queries, keys = x.query_segments_bs, x.key_segments_bt
    seen = seen & (queries[:, :, None] == keys[:, None]) & (queries != 0)[:, :, None]
    scores_bsht = jnp.where(seen[:, :, None], scores_bxt.reshape(b, s, h, t), HIDDEN)
    highest = jnp.maximum(scores_bsht.max(-1, keepdims=True), FLOOR)
    p_bsht = jnp.exp(scores_bsht - highest)
    total = p_bsht.sum(-1, keepdims=True)
    p_bxt, v_btz = p_bsht.reshape(b, s * h, t).astype(v_btkc.dtype), v_btkc.reshape(b, t, num_kv * c)
    out_bxz = jnp.einsum("bxt,btz->bxz", p_bxt, v_btz, preferred_element_type=sums)
    out = jnp.einsum("bskgjc,kj->bskgc", out_bxz.reshape(b, s, num_kv, h // num_kv, num_kv, c), own_kj.astype(sums))
    out_bshc = out.reshape(b, s, h, c) / jnp.where(total > 0, total, 1)
    lse = jnp.where(total > 0, highest + jnp.log(jnp.where(total > 0, total, 1)), FLOOR)
    return out_bshc, lse[..., 0]
