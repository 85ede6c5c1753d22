"""Decode state: keys and values of every layer, and what else its form of attention keeps of earlier tokens."""

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
    """State of the whole model after `length` tokens.

    Attributes:
      layers: one entry a position in the period of the layer pattern, what its form of attention keeps
        (`Attention.init_cache`), leaves [groups, …].
      segments_bt: int32 document of each cached token, 0 where there is none yet.
      length: int32, tokens in the cache, the same for every row.
    """

    layers: tuple[Any, ...]
    segments_bt: jax.Array
    length: jax.Array

    @property
    def capacity(self) -> int:
        """Tokens the cache can hold."""
        return self.segments_bt.shape[1]


def write(cache: KeyValues, k_bskc: jax.Array, v_bskc: jax.Array, length: jax.Array | int) -> KeyValues:
    """`cache` with the new tokens' keys and values from index `length` on."""

    def written(old: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), length, 1)

    return KeyValues(written(cache.k_btkc, k_bskc), written(cache.v_btkc, v_bskc))
