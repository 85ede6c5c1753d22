"""Counting sort of tokens by class, stable, in one launch.

A program places the tokens of one tile. How many tokens of each class come before the tile it counts itself, since
reading all classes from the cache is faster than a second launch. Each thread counts its own tokens of all tiles;
threads add up their counts twice, before the program's tile and after the last.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.launch import Out, launch, load, store
from pallas_kernels.tiles import Architecture, tile

_MOST = 2**19  # tokens × classes² of a program, whose counts, one for each token and class, are in registers


def class_sort(
    class_t: jax.Array, classes: int, dtype: jax.typing.DTypeLike, *, architecture: Architecture
) -> tuple[jax.Array, jax.Array]:
    """Sort tokens by class.

    The int32 class of a token may be `classes` or more, which is one more class, the last. `dtype` is that of
    activations, with which tiles are measured. Returns int32 [t], the tokens in the order of their classes, otherwise
    in their own; and int32 [classes], the number of tokens of each class.
    """
    cut = tile("class_sort", architecture, dtype)
    lanes, count = pl.next_power_of_2(classes), class_t.shape[0]
    tokens = min(cut.sizes[0], max(_MOST // lanes**2, 1))
    out = Out((count,), jnp.int32), Out((classes,), jnp.int32)
    kernel = functools.partial(_kernel, tokens=tokens, lanes=lanes)
    return launch("class_sort", kernel, (class_t,), out, (pl.cdiv(count, tokens),), cut, architecture)


def _kernel(class_ref: Any, order_ref: Any, sizes_ref: Any, *, tokens: int, lanes: int) -> None:
    count, classes, own = class_ref.shape[0], sizes_ref.shape[0], pl.program_id(0)
    lane = jnp.arange(lanes, dtype=jnp.int32)

    def labels(index: jax.Array | int) -> jax.Array:
        """Return the classes of the tokens of a tile, the last class for tokens past the end."""
        token = index * tokens + jnp.arange(tokens, dtype=jnp.int32)
        return load(class_ref.at[token], mask=token < count, other=classes)

    def members(label: jax.Array) -> jax.Array:
        """Return int32 [lanes, tokens], 1 in the lane of each token's class; the last class has no lane.

        Tokens are the second axis, along which threads lie, so that each thread has few tokens and all their lanes.
        """
        return ((label[None, :] == lane[:, None]) & (lane < classes)[:, None]).astype(jnp.int32)

    def counted(first: jax.Array | int, end: jax.Array) -> jax.Array:
        """Return the number of tokens of each class in some tiles."""

        def add(index: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            total, label = carry
            following = labels(index + 1)  # on the way while this tile is counted
            return total + members(label), following

        zeros = jnp.zeros((lanes, tokens), jnp.int32)
        return jax.lax.fori_loop(first, end, add, (zeros, labels(first)))[0].sum(1)

    before = counted(0, own)
    every = before + counted(own, pl.cdiv(count, tokens))
    token, member = own * tokens + jnp.arange(tokens, dtype=jnp.int32), members(labels(own))
    earlier = jnp.cumsum(member, axis=1) - member + before[:, None]  # tokens of each class before each token
    start = jnp.cumsum(every) - every
    # A token of the last class comes after all others, and after those of its class before it.
    last = every.sum() + token - earlier.sum(0)
    placed = (member * (earlier + start[:, None])).sum(0)
    place = jnp.where(member.sum(0) > 0, placed, last)
    store(order_ref.at[jnp.where(token < count, place, count)], token, mask=token < count)

    @pl.when(own == 0)
    def _() -> None:
        store(sizes_ref.at[lane], every, mask=lane < classes)
