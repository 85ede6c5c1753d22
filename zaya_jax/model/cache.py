"""Decode state: the keys and values of every layer, and whatever else its attention keeps of earlier tokens."""

import dataclasses
from typing import Any, NamedTuple

import jax


class KeyValues(NamedTuple):
    """Keys and values of one layer, heads side by side: x = k·c.

    With the heads on an axis of their own, XLA would copy the whole cache at each decode step.
    """

    k_btx: jax.Array
    v_btx: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Decode state of the whole model after `length` tokens."""

    layers: tuple[Any, ...]  # for each layer, the state of `Attention.init_cache`
    segments_bt: jax.Array  # int32 document of each cached token; 0 where empty
    length: jax.Array  # int32, number of tokens in the cache, the same for every row

    @property
    def capacity(self) -> int:
        """Number of tokens that the cache can hold."""
        return self.segments_bt.shape[1]
