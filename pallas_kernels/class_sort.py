"""Counting sort of tokens by class, stable, in one launch.

A program places the tokens of one tile. How many tokens of each class come before the tile it counts itself, since
reading all classes from the cache is faster than a second launch.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.launch import launch
from pallas_kernels.tiles import Architecture, tile


def class_sort(class_t: jax.Array, classes: int, *, architecture: Architecture) -> tuple[jax.Array, jax.Array]:
    """Sort tokens by class.

    Args:
      class_t: int32 class of each token; values of `classes` and more are one more class, the last.
      classes: number of classes without the last.
      architecture: see `launch`.

    Returns:
      int32 [t], the tokens in the order of their classes, otherwise in their own; and int32 [classes], the number of
      tokens of each class.
    """
    (tokens,), warps, _ = tile("class_sort", architecture, jnp.int32)
    count = class_t.shape[0]
    order_t, sizes = launch(
        functools.partial(_kernel, tokens=tokens, lanes=pl.next_power_of_2(classes + 1)),
        class_t,
        name="class_sort", grid=(pl.cdiv(count, tokens),),
        out_shape=(jax.ShapeDtypeStruct((count,), jnp.int32), jax.ShapeDtypeStruct((classes,), jnp.int32)),
        warps=warps, architecture=architecture,
    )  # fmt: skip
    return order_t, sizes


def _kernel(class_ref: Any, order_ref: Any, sizes_ref: Any, *, tokens: int, lanes: int) -> None:
    count, classes, own = class_ref.shape[0], sizes_ref.shape[0], pl.program_id(0)
    lane = jnp.arange(lanes, dtype=jnp.int32)

    def members(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the tokens of a tile, and for each of them 1 in the lane of its class; int32."""
        token = index * tokens + jnp.arange(tokens, dtype=jnp.int32)
        label = triton.load(class_ref.at[token], mask=token < count, other=-1)
        return token, (jnp.minimum(label, classes)[:, None] == lane[None, :]).astype(jnp.int32)

    def add(index: jax.Array, totals: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number = jnp.sum(members(index)[1], axis=0)
        return totals[0] + number, totals[1] + jnp.where(index < own, number, 0)

    zeros = jnp.zeros((lanes,), jnp.int32)
    every, before = jax.lax.fori_loop(0, pl.cdiv(count, tokens), add, (zeros, zeros))
    token, member = members(own)
    rank = jnp.cumsum(member, axis=0) - member + (jnp.cumsum(every, axis=0) - every + before)[None, :]
    place = jnp.where(token < count, jnp.sum(member * rank, axis=1), count)  # past the end, where nothing is stored
    triton.store(order_ref.at[place], token, mask=token < count)

    @pl.when(own == 0)
    def _() -> None:
        triton.store(sizes_ref.at[lane], every, mask=lane < classes)
