"""Attention of the few queries of a decode step to many keys: reads each key once, where it is in the cache."""

import jax
import jax.numpy as jnp

from zaya_jax.ops.blockwise import FLOOR, HIDDEN
from zaya_jax.ops.precision import accumulation_dtype

MAX_QUERIES = 4  # queries; with more, blocks that skip hidden keys are faster


def few_queries(
    q_bshc: jax.Array, k_btkc: jax.Array, v_btkc: jax.Array, query_segments_bs: jax.Array, key_segments_bt: jax.Array,
    query_offset: jax.Array | int, window: int | None,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Compute attention with one softmax over all keys; the arguments are those of `ops.attention.attention`.

    Every query is multiplied by the keys of all heads, with zeros for the heads of others. That is num_kv times the
    FLOPs, but a step is limited by reading the cache, and a product for each head would transpose the cache first.

    Returns:
      The output [b, s, h, c] and the log-sum-exp of each query [b, s, h] (`FLOOR` if it sees no key), in fp32 (float64
      for float64 inputs).
    """
    b, s, h, c = q_bshc.shape
    t, num_kv = k_btkc.shape[1:3]
    sums = accumulation_dtype(q_bshc.dtype)
    own_kj = jnp.eye(num_kv, dtype=q_bshc.dtype)
    q_bskgc = (q_bshc * c**-0.5).reshape(b, s, num_kv, h // num_kv, c)
    q_bxz = jnp.einsum("bskgc,kj->bskgjc", q_bskgc, own_kj).reshape(b, s * h, num_kv * c)
    scores_bxt = jnp.einsum("bxz,btz->bxt", q_bxz, k_btkc.reshape(b, t, num_kv * c), preferred_element_type=sums)
    query, key = jnp.arange(s)[:, None] + query_offset, jnp.arange(t)
    seen = key <= query
    if window is not None:
        seen &= key > query - window
    seen = seen & (query_segments_bs[:, :, None] == key_segments_bt[:, None]) & (query_segments_bs != 0)[:, :, None]
    scores_bsht = jnp.where(seen[:, :, None], scores_bxt.reshape(b, s, h, t), HIDDEN)
    highest = jnp.maximum(scores_bsht.max(-1, keepdims=True), FLOOR)
    p_bsht = jnp.exp(scores_bsht - highest)
    total = p_bsht.sum(-1, keepdims=True)
    out_bxz = jnp.einsum("bxt,btz->bxz", p_bsht.reshape(b, s * h, t).astype(v_btkc.dtype),
                         v_btkc.reshape(b, t, num_kv * c), preferred_element_type=sums)  # fmt: skip
    out = jnp.einsum("bskgjc,kj->bskgc", out_bxz.reshape(b, s, num_kv, h // num_kv, num_kv, c), own_kj.astype(sums))
    out_bshc = out.reshape(b, s, h, c) / jnp.where(total > 0, total, 1)
    lse = jnp.where(total > 0, highest + jnp.log(jnp.where(total > 0, total, 1)), FLOOR)
    return out_bshc, lse[..., 0]
