"""Decode state: keys and values, the convolution's tail and the delayed value of every layer."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp

from zaya_jax.config import ModelConfig
from zaya_jax.ops.cca_mix import Halo
from zaya_jax.ops.precision import accumulation_dtype


class LayerCache(NamedTuple):
    """State of one layer; in `Cache` every leaf has a leading axis over the groups of the layer scan.

    The convolution's tail and the delayed value are fp32 whatever the model computes in (zaya1.md §1.3). Attention
    that has neither holds no rows of the one and no channels of the other.
    """

    k_btkc: jax.Array
    v_btkc: jax.Array
    u_bwnc: jax.Array
    delayed_b1x: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """State of the whole model after `length` tokens.

    Attributes:
      layers: one entry a position in the period of the layer pattern, leaves [groups, …].
      segments_bt: int32 document of each cached token, 0 where there is none yet.
      length: int32, tokens in the cache, the same for every row.
    """

    layers: tuple[LayerCache, ...]
    segments_bt: jax.Array
    length: jax.Array

    @property
    def capacity(self) -> int:
        """Tokens the cache can hold."""
        return self.segments_bt.shape[1]


def empty(
    config: ModelConfig, batch: int, capacity: int, dtype: jax.typing.DTypeLike, rows: int = 0, delayed: int = 0
) -> LayerCache:
    """The state of one layer before the first token.

    Args:
      config: its sizes.
      batch: rows of tokens.
      capacity: tokens of a row.
      dtype: of keys and values.
      rows: of the convolutions' tail.
      delayed: channels of the delayed value.
    """
    heads, exact = config.num_query_heads + config.num_kv_heads, accumulation_dtype(dtype)
    kv = (batch, capacity, config.num_kv_heads, config.head_dim)
    return LayerCache(jnp.zeros(kv, dtype), jnp.zeros(kv, dtype),
                      jnp.zeros((batch, rows, heads, config.head_dim), exact),
                      jnp.zeros((batch, 1, delayed), exact))  # fmt: skip


def halo(layer: LayerCache, cache_segments_bt: jax.Array, length: jax.Array) -> Halo:
    """What the cache knows of the tokens before the next one."""
    rows = max(layer.u_bwnc.shape[1], 1)
    padded = jnp.pad(cache_segments_bt, ((0, 0), (rows, 0)))
    return Halo(layer.u_bwnc, jax.lax.dynamic_slice_in_dim(padded, length, rows, 1), layer.delayed_b1x)


def advance(layer: LayerCache, k_bskc: jax.Array, v_bskc: jax.Array, u_bsnc: jax.Array, delayed_bsx: jax.Array,
            length: jax.Array) -> LayerCache:  # fmt: skip
    """`layer` with the new tokens written from index `length` on, and the rows the next ones need."""
    rows = layer.u_bwnc.shape[1]
    tail = jnp.concatenate([layer.u_bwnc, u_bsnc.astype(layer.u_bwnc.dtype)], 1)
    return write(layer, k_bskc, v_bskc, length)._replace(
        u_bwnc=tail[:, tail.shape[1] - rows :], delayed_b1x=delayed_bsx[:, -1:].astype(layer.delayed_b1x.dtype)
    )


def write(layer: LayerCache, k_bskc: jax.Array, v_bskc: jax.Array, length: jax.Array) -> LayerCache:
    """`layer` with the new tokens' keys and values from index `length` on."""
    k = jax.lax.dynamic_update_slice_in_dim(layer.k_btkc, k_bskc.astype(layer.k_btkc.dtype), length, 1)
    v = jax.lax.dynamic_update_slice_in_dim(layer.v_btkc, v_bskc.astype(layer.v_btkc.dtype), length, 1)
    return layer._replace(k_btkc=k, v_btkc=v)
