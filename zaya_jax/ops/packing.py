"""The layout in which the vendors' libraries take packed documents: those of all rows one after the other."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.attention_tiles import AttentionInputs


class Packing(NamedTuple):
    """The documents of all rows one after the other, up to a static number of them, `n`."""

    lengths_n: jax.Array  # int32 tokens of each document, 0 for those that are not there
    starts_n: jax.Array  # int32 [n + 1], first token of each, in all rows; the number of tokens for those not there
    rank_t: jax.Array  # int32, document of each token of all rows
    fits: jax.Array  # whether a library computes attention to these documents


def pack(query_segments_bs: jax.Array, key_segments_bs: jax.Array, documents: int) -> Packing:
    """Compute the packed layout of the documents in all rows; each run of padding counts as a document.

    `fits` is false if there are more than `documents`, if the tokens of a document are not contiguous, or if queries
    and keys have different documents.
    """
    segments, tokens = query_segments_bs, query_segments_bs.size
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    first = segments != before
    new = (segments == 0) | (segments > jax.lax.cummax(before, axis=1))
    rank_t = jnp.cumsum(first) - 1
    starts_n = jnp.nonzero(first.ravel(), size=documents + 1, fill_value=tokens)[0].astype(jnp.int32)
    fits = (starts_n[-1] == tokens) & (~first | new).all() & (query_segments_bs == key_segments_bs).all()
    return Packing(jnp.diff(starts_n), starts_n, rank_t.astype(jnp.int32), fits)


def without_padding(x: AttentionInputs, array_bshc: jax.Array) -> jax.Array:
    """Return an array of the queries with 0 for padding."""
    return jnp.where((x.query_segments_bs != 0)[..., None, None], array_bshc, 0)
