"""Attention of new tokens to a cache of keys and values, which they join.

The cache of a layer with a window is a ring: token i is in slot i mod size, and only the last `window` tokens are kept.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

KeysAndValues = tuple[jax.Array, jax.Array]


def cached_attention(
    attention: Callable[..., jax.Array], q_bshc: jax.Array, new: KeysAndValues, cache: KeysAndValues, *,
    segments_bs: jax.Array, cached_segments_bt: jax.Array, length: jax.Array | int, window: int | None,
) -> tuple[jax.Array, KeysAndValues]:  # fmt: skip
    """Write new keys and values to a layer's cache, and attend to it.

    Args:
      attention: `ops.attention.attention`.
      q_bshc: queries of the new tokens.
      new: their keys and values [b, s, k, c].
      cache: keys and values [b, slots, k·c], heads side by side; with fewer slots than the cache has tokens, a ring.
      segments_bs: int32 documents of the new tokens.
      cached_segments_bt: int32 documents of the tokens in the whole cache, 0 where empty.
      length: number of tokens in the cache before the new ones.
      window: number of keys that a query sees, its own included; None for all.

    Returns:
      The output [b, s, h, c] in the dtype of the queries, and the new keys and values of the cache.
    """
    slots, s, dtype = cache[0].shape[1], q_bshc.shape[1], q_bshc.dtype
    ring = slots < cached_segments_bt.shape[1]
    if ring and s > 1:
        return _through_ring(attention, q_bshc, new, cache, segments_bs, cached_segments_bt, length, window)
    slot = length % slots if ring else length
    cache = _write(cache, new, slot)
    seen_bt = jax.lax.dynamic_update_slice_in_dim(cached_segments_bt, segments_bs, length, 1)
    if ring:  # one query sees every slot, whatever their order
        seen_bt = jnp.take(seen_bt, length - (length - jnp.arange(slots)) % slots, axis=1, mode="fill", fill_value=0)
    k, v = (split_heads(x, new[0], dtype) for x in cache)
    out = attention(q_bshc, k, v, query_segments_bs=segments_bs, key_segments_bt=seen_bt,
                    query_offset=slots - 1 if ring else length, window=None if ring else window)  # fmt: skip
    return out, cache


def merge_heads(x_bskc: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return keys or values as caches have them, [b, s, k·c] in `dtype`."""
    return x_bskc.reshape(*x_bskc.shape[:2], -1).astype(dtype)


def split_heads(x_btx: jax.Array, like_bskc: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Undo `merge_heads`, with the heads of `like_bskc`."""
    return x_btx.reshape(*x_btx.shape[:2], *like_bskc.shape[2:]).astype(dtype)


def _write(cache: KeysAndValues, new: KeysAndValues, slot: jax.Array | int) -> KeysAndValues:
    def write(k: jax.Array, v: jax.Array) -> KeysAndValues:
        update = jax.lax.dynamic_update_slice_in_dim
        return (update(k, merge_heads(new[0], k.dtype), slot, 1), update(v, merge_heads(new[1], v.dtype), slot, 1))

    # XLA:CPU fuses the updates with what reads them, and copies the caches for it, unless a branch separates the two.
    def write_in_branch(k: jax.Array, v: jax.Array) -> KeysAndValues:
        return jax.lax.cond(jnp.asarray(slot) >= 0, write, lambda *unchanged: unchanged, k, v)

    return jax.lax.platform_dependent(*cache, cpu=write_in_branch, default=write)


def _through_ring(
    attention: Callable[..., jax.Array], q: jax.Array, new: KeysAndValues, cache: KeysAndValues, segments: jax.Array,
    cached_segments: jax.Array, length: jax.Array | int, window: int | None,
) -> tuple[jax.Array, KeysAndValues]:  # fmt: skip
    """Attend from several tokens: the ring in the order of its tokens, then the new ones."""
    slots, s = cache[0].shape[1], q.shape[1]
    ordered = [
        jnp.concatenate([jnp.roll(old, -(length % slots), 1), merge_heads(x, old.dtype)], 1)
        for old, x in zip(cache, new, strict=True)
    ]
    before = jax.lax.dynamic_slice_in_dim(jnp.pad(cached_segments, ((0, 0), (slots, 0))), length, slots, 1)
    k, v = (split_heads(x, new[0], q.dtype) for x in ordered)
    out = attention(q, k, v, query_segments_bs=segments, key_segments_bt=jnp.concatenate([before, segments], 1),
                    query_offset=slots, window=window)  # fmt: skip
    k, v = (jnp.roll(x[:, s:], (length + s) % slots, 1) for x in ordered)
    return out, (k, v)
