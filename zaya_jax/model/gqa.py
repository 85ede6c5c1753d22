"""Grouped-query attention (arXiv 2305.13245), a baseline for CCA, and the same with CCA's norm of queries and keys.

Both have the heads, projections, RoPE and windows of CCA, but no convolutions, query-key mean or delayed value.
"""

from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.config import ModelConfig
from zaya_jax.config.model import LayerKind
from zaya_jax.model.attention import Attention, Context, KeyValues
from zaya_jax.model.layers import param
from zaya_jax.ops import Ops
from zaya_jax.ops.cca_mix import rotate, unit
from zaya_jax.ops.names import recomputed
from zaya_jax.ops.precision import accumulation_dtype


class GQA(Attention):
    """Grouped-query attention, with QK-norm or not; the ZAYA model of `transformers` does not have it."""

    PROJECTIONS = ("query", "key", "value")

    def __init__(self, config: ModelConfig, layer: LayerKind, key: jax.Array) -> None:
        super().__init__(config, layer, list(jax.random.split(key, 4)), config.kv_size)
        if layer.attention == "gqa_qk_norm":
            self.temperature = param(jnp.ones(config.num_kv_heads), "temperature")

    def __call__(self, h_bsd: jax.Array, context: Context, cache: KeyValues | None, ops: Ops) -> tuple[jax.Array, Any]:
        """Apply attention; returns [b, s, d] in the dtype of `h_bsd`, and the new decode state (None without one)."""
        config = self.config
        packed_bsnc = self.project(h_bsd).reshape(*h_bsd.shape[:2], -1, config.head_dim)
        q, k, v = jnp.split(packed_bsnc, [config.num_query_heads, config.num_query_heads + config.num_kv_heads], axis=2)
        if self.layer.attention == "gqa_qk_norm":
            q, k = _norm(q, k, self.temperature[...])
        table = context.rotary[self.layer.rope_base]
        q, k = _rotate(q, *table), _rotate(k, *table)
        return self.attend(q, k, v, cache, context, ops)


@recomputed
def _norm(q_bshc: jax.Array, k_bskc: jax.Array, temperature_k: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scale each query to norm √c, and each key to √c times its head's temperature, in fp32, as CCA does."""
    dtype, exact = q_bshc.dtype, accumulation_dtype(q_bshc.dtype)
    k_bskc = unit(k_bskc.astype(exact)) * temperature_k.astype(exact)[:, None]
    return unit(q_bshc.astype(exact)).astype(dtype), k_bskc.astype(dtype)


@recomputed
def _rotate(x_bsnc: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Apply RoPE in fp32; the result has the dtype of `x_bsnc`."""
    x_nbsc = x_bsnc.astype(accumulation_dtype(x_bsnc.dtype)).transpose(2, 0, 1, 3)
    return rotate(x_nbsc, cos, sin).astype(x_bsnc.dtype).transpose(1, 2, 0, 3)
