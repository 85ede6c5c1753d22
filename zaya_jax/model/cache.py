"""Decode state: the keys and values of every layer, and whatever else its attention keeps of earlier tokens."""

import dataclasses
from typing import Any, NamedTuple

import jax


class KeyValues(NamedTuple):
    """Keys and values of one layer."""

    k_btkc: jax.Array
    v_btkc: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Decode state of the whole model after `length` tokens.

    Attributes:
      layers: for each position in the period of the layer pattern, the state of `Attention.init_cache`, with leaves
        [groups, …].
      segments_bt: int32 document of each cached token; 0 where empty.
      length: int32, number of tokens in the cache, the same for every row.
    """

    layers: tuple[Any, ...]
    segments_bt: jax.Array
    length: jax.Array

    @property
    def capacity(self) -> int:
        """Number of tokens that the cache can hold."""
        return self.segments_bt.shape[1]


def write(cache: KeyValues, k_bskc: jax.Array, v_bskc: jax.Array, length: jax.Array | int) -> KeyValues:
    """Write the keys and values of new tokens to `cache`, from index `length` on."""

    def written(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), length, 1)

    return KeyValues(written(cache.k_btkc, k_bskc), written(cache.v_btkc, v_bskc))
