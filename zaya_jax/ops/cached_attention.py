"""Attention of new tokens to a cache of keys and values, which they join.

The cache of a layer with a window is a ring: token i is in slot i mod size, and only the last `window` tokens are kept.
"""

import dataclasses
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from zaya_jax.ops.attention import AttentionInputs

KeysAndValues = tuple[jax.Array, jax.Array]
Attend = Callable[..., jax.Array]  # `ops.attention.attention`


def cached_attention(attention: Attend, x: AttentionInputs, cache: KeysAndValues) -> tuple[jax.Array, KeysAndValues]:
    """Write new keys and values to a layer's cache, and attend to it.

    `x` has queries, keys and values of the new tokens, and their documents; those of the tokens in the whole cache, 0
    where empty; and how many tokens the cache has before the new ones. `cache` are keys and values [b, slots, k·c],
    heads side by side; with fewer slots than the cache has tokens, a ring. Returns the output [b, s, h, c] in the dtype
    of the queries, and the new keys and values of the cache.
    """
    slots, length, segments = cache[0].shape[1], x.query_offset, x.query_segments_bs
    ring = slots < x.key_segments_bt.shape[1]
    if ring and x.q_bshc.shape[1] > 1:
        return _through_ring(attention, x, cache)
    slot = length % slots if ring else length
    cache = _write(cache, (x.k_btkc, x.v_btkc), slot)
    seen_bt = jax.lax.dynamic_update_slice_in_dim(x.key_segments_bt, segments, length, 1)
    if ring:  # one query sees every slot, whatever their order
        seen_bt = jnp.take(seen_bt, length - (length - jnp.arange(slots)) % slots, axis=1, mode="fill", fill_value=0)
        x = dataclasses.replace(x, query_offset=slots - 1, window=None)
    return _attend(attention, x, cache, seen_bt), cache


def _attend(attention: Attend, x: AttentionInputs, heads: Iterable[jax.Array], key_segments_bt: jax.Array) -> jax.Array:
    """Attend from the queries of `x` to keys and values with heads side by side."""
    k, v = (split_heads(array, x.k_btkc, x.q_bshc.dtype) for array in heads)
    return dataclasses.replace(x, k_btkc=k, v_btkc=v, key_segments_bt=key_segments_bt).call(attention)


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


def _through_ring(attention: Attend, x: AttentionInputs, cache: KeysAndValues) -> tuple[jax.Array, KeysAndValues]:
    """Attend from several tokens: the ring in the order of its tokens, then the new ones."""
    slots, s, length = cache[0].shape[1], x.q_bshc.shape[1], x.query_offset
    ordered = [
        jnp.concatenate([jnp.roll(old, -(length % slots), 1), merge_heads(new, old.dtype)], 1)
        for old, new in zip(cache, (x.k_btkc, x.v_btkc), strict=True)
    ]
    before = jax.lax.dynamic_slice_in_dim(jnp.pad(x.key_segments_bt, ((0, 0), (slots, 0))), length, slots, 1)
    documents = jnp.concatenate([before, x.query_segments_bs], 1)
    out = _attend(attention, dataclasses.replace(x, query_offset=slots), ordered, documents)
    k, v = (jnp.roll(array[:, s:], (length + s) % slots, 1) for array in ordered)
    return out, (k, v)
