"""Attention of new tokens to a cache of keys and values, which they join.

Rows of a cache can have different lengths. Padding after the last new token of a row is not kept, so rows can have
different numbers of new tokens. The cache of a layer with a window is a ring: token i is in slot i mod size, and
only the last `window` tokens are kept.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.decode import decodes
from zaya_jax.ops.attention import AttentionInputs

KeysAndValues = tuple[jax.Array, jax.Array]
Attend = Callable[..., jax.Array]  # `ops.attention.attention`
NOWHERE = 2**30  # a slot that no cache has


def count_kept(segments_bs: jax.Array) -> jax.Array:
    """Count the new tokens of each row that a cache keeps: all up to the last one that is not padding."""
    return jnp.where(segments_bs != 0, jnp.arange(1, segments_bs.shape[1] + 1, dtype=jnp.int32), 0).max(1)


def new_slots(segments_bs: jax.Array, length_b: jax.Array) -> jax.Array:
    """Return the slot of each new token after `length_b` tokens of its row, [b, s]; `NOWHERE` if it is not kept."""
    index = jnp.arange(segments_bs.shape[1], dtype=jnp.int32)
    return jnp.where(index < count_kept(segments_bs)[:, None], length_b[:, None] + index, NOWHERE)


def cache_slots(segments_bs: jax.Array, length_b: jax.Array, slots: int, places: int) -> jax.Array:
    """Return `new_slots` in the cache of a layer, which is a ring if it has fewer slots than places."""
    slot_bs = new_slots(segments_bs, length_b)
    if slots >= places:
        return slot_bs
    # Of more new tokens than slots, the last ones are kept.
    last = (length_b + count_kept(segments_bs))[:, None] - slots
    return jnp.where((slot_bs < last) | (slot_bs == NOWHERE), NOWHERE, slot_bs % slots)


def last_rows(before: jax.Array, new: jax.Array, kept_b: jax.Array) -> jax.Array:
    """Return as many rows as `before` has, up to the last one kept of the rows that follow it."""
    rows = jnp.concatenate([before, new.astype(before.dtype)], 1)
    index = kept_b[:, None] + jnp.arange(before.shape[1])
    return jnp.take_along_axis(rows, jnp.expand_dims(index, tuple(range(2, rows.ndim))), axis=1)


def write_slots(cache_bt: jax.Array, new_bs: jax.Array, slot_bs: jax.Array) -> jax.Array:
    """Write new tokens to their slots of a cache [b, slots, …], without those whose slot it does not have."""
    slot_bs = jnp.where(slot_bs < 0, NOWHERE, slot_bs)
    return cache_bt.at[jnp.arange(len(slot_bs))[:, None], slot_bs].set(new_bs.astype(cache_bt.dtype), mode="drop")


def cached_attention(attention: Attend, x: AttentionInputs, cache: KeysAndValues) -> tuple[jax.Array, KeysAndValues]:
    """Write new keys and values to a layer's cache, and attend to it.

    `x` has queries, keys and values of the new tokens, and their documents; those of all tokens, the new ones included,
    by their place in the row, 0 where empty; and how many tokens each row has before the new ones (`query_offset`,
    int32 [b]). Its keys and values are None if the cache has them already. `cache` are keys and values
    [b, slots, k·c], heads side by side; with fewer slots than a row has places, a ring. Returns the output [b, s, h, c]
    in the dtype of the queries, and the new keys and values of the cache.
    """
    slots, length_b, seen_bt = cache[0].shape[1], x.query_offset, x.key_segments_bt
    slot_bs = cache_slots(x.query_segments_bs, length_b, slots, seen_bt.shape[1])
    if slots >= seen_bt.shape[1]:
        cache = write_heads(cache, x, slot_bs)
        return by_row(lambda x: x.call(attention), with_heads(x, cache, seen_bt)), cache
    if x.q_bshc.shape[1] > 1:
        return _through_ring(attention, x, cache), write_heads(cache, x, slot_bs)
    cache = write_heads(cache, x, slot_bs)
    # One query sees every slot, whatever their order.
    place_bt = length_b[:, None] - (length_b[:, None] - jnp.arange(slots)) % slots
    x = dataclasses.replace(x, query_offset=slots - 1, window=None)
    return with_heads(x, cache, take_places(seen_bt, place_bt)).call(attention), cache


def by_row(attend: Callable[[AttentionInputs], Any], x: AttentionInputs) -> Any:
    """Call `attend` with rows of different `query_offset` [b]: together for one query, else row by row."""
    if x.q_bshc.shape[1] == 1 and decodes(x):
        return attend(x)
    rows = [jax.tree.map(lambda array, i=i: array[i : i + 1], x) for i in range(len(x.q_bshc))]
    out = [attend(dataclasses.replace(row, query_offset=row.query_offset[0])) for row in rows]
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), *out)


def _through_ring(attention: Attend, x: AttentionInputs, cache: KeysAndValues) -> jax.Array:
    """Attend from several tokens: to the ring in the order of its tokens, then to the new ones."""
    slots = cache[0].shape[1]
    place_bt = x.query_offset[:, None] - slots + jnp.arange(slots)
    ordered = [
        jnp.concatenate([jnp.take_along_axis(old, place_bt[:, :, None] % slots, 1), merge_heads(new, old.dtype)], 1)
        for old, new in zip(cache, (x.k_btkc, x.v_btkc), strict=True)
    ]
    documents = jnp.concatenate([take_places(x.key_segments_bt, place_bt), x.query_segments_bs], 1)
    return with_heads(dataclasses.replace(x, query_offset=slots), ordered, documents).call(attention)


def take_places(segments_bt: jax.Array, place_bs: jax.Array) -> jax.Array:
    """Return the documents of the tokens at these places of each row; 0 before its first token."""
    taken = jnp.take_along_axis(segments_bt, jnp.maximum(place_bs, 0), axis=1, mode="clip")
    return jnp.where(place_bs < 0, 0, taken)


def with_heads(x: AttentionInputs, cache: Iterable[jax.Array], key_segments_bt: jax.Array) -> AttentionInputs:
    """Return `x` with the keys and values of a cache, and their documents."""
    k, v = (split_heads(array, x.q_bshc) for array in cache)
    return dataclasses.replace(x, k_btkc=k, v_btkc=v, key_segments_bt=key_segments_bt)


def merge_heads(x_bskc: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Return keys or values as caches have them, [b, s, k·c] in `dtype`."""
    return x_bskc.reshape(*x_bskc.shape[:2], -1).astype(dtype)


def split_heads(x_btx: jax.Array, like_bshc: jax.Array) -> jax.Array:
    """Undo `merge_heads`, with channels and dtype of `like_bshc`."""
    return x_btx.reshape(*x_btx.shape[:2], -1, like_bshc.shape[3]).astype(like_bshc.dtype)


def write_heads(cache: KeysAndValues, x: AttentionInputs, slot_bs: jax.Array) -> KeysAndValues:
    """Write the keys and values of `x`, if it has any, to a cache, see `write_slots`."""
    if x.k_btkc is None:
        return cache

    def write(k: jax.Array, v: jax.Array) -> KeysAndValues:
        new = (merge_heads(array, k.dtype) for array in (x.k_btkc, x.v_btkc))
        return write_slots(k, next(new), slot_bs), write_slots(v, next(new), slot_bs)

    # XLA:CPU fuses the write of one token with what reads it, and copies the cache for it, unless a branch separates
    # the two.
    def write_in_branch(k: jax.Array, v: jax.Array) -> KeysAndValues:
        return jax.lax.cond(slot_bs[0, 0] >= 0, write, lambda *unchanged: unchanged, k, v)

    branch = write_in_branch if slot_bs.size == 1 else write
    return jax.lax.platform_dependent(*cache, cpu=branch, default=write)
