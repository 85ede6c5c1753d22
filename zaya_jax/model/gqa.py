"""Grouped-query attention as CCA would be without what is its own (arXiv 2305.13245).

No convolution, no mean of queries and keys, no norm, no temperature, no delayed value; heads, projections,
rotary embedding and windows are those of CCA, so that the two differ in nothing else.
"""

import jax
import jax.numpy as jnp

from zaya_jax.config import ModelConfig
from zaya_jax.config.model import LayerKind
from zaya_jax.model.attention import Attention, Context
from zaya_jax.model.cache import KeyValues, write
from zaya_jax.model.layers import recomputed
from zaya_jax.ops import Ops
from zaya_jax.ops.cca_mix import rotate
from zaya_jax.ops.precision import accumulation_dtype


class GQA(Attention):
    """Grouped-query attention; a `transformers` ZAYA has no form of it."""

    PROJECTIONS = ("query", "key", "value")

    def __init__(self, config: ModelConfig, layer: LayerKind, key: jax.Array) -> None:
        super().__init__(config, layer, list(jax.random.split(key, 4)), config.kv_size)

    def __call__(
        self, h_bsd: jax.Array, context: Context, cache: KeyValues | None, ops: Ops
    ) -> tuple[jax.Array, KeyValues | None]:
        """`h_bsd` mixed along the sequence, and the layer's decode state if there is one."""
        config, dtype = self.config, h_bsd.dtype
        packed_bsnc = self.project(h_bsd).reshape(*h_bsd.shape[:2], -1, config.head_dim)
        q, k, v = jnp.split(packed_bsnc, [config.num_query_heads, config.num_query_heads + config.num_kv_heads], axis=2)
        turn, table = recomputed(_rotate), context.rotary[self.layer.rope_base]
        q, k = turn(q, *table), turn(k, *table)
        if cache is not None:
            cache = write(cache, k, v, context.length)
            k, v = (x.astype(dtype) for x in cache)
        return self.attend(q, k, v, context, ops), cache


def _rotate(x_bsnc: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding in fp32, in the dtype of `x_bsnc`."""
    x_bnsc = x_bsnc.astype(accumulation_dtype(x_bsnc.dtype)).transpose(0, 2, 1, 3)
    return rotate(x_bnsc, cos, sin).astype(x_bsnc.dtype).transpose(0, 2, 1, 3)
