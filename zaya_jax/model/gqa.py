"""Grouped-query attention as CCA would be without what is its own (arXiv 2305.13245).

No convolution, no mean of queries and keys, no norm, no temperature, no delayed value; heads, projections,
rotary embedding and windows are those of CCA, so that the two differ in nothing else.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from zaya_jax.config import ModelConfig
from zaya_jax.config.model import AttentionKind
from zaya_jax.model import cache as decode
from zaya_jax.model.cache import LayerCache
from zaya_jax.model.cca import Context
from zaya_jax.model.layers import matrix, param, recomputed
from zaya_jax.ops import Ops
from zaya_jax.ops.cca_mix import rotate
from zaya_jax.ops.names import MATMUL_OUTPUT
from zaya_jax.ops.precision import accumulation_dtype


class GQA(nnx.Module):
    """Attention of h query heads to k heads of keys and values, each shared by h / k queries."""

    def __init__(self, config: ModelConfig, kind: AttentionKind, key: jax.Array) -> None:
        d = config.hidden_size
        keys = jax.random.split(key, 4)
        self.query = param(matrix(keys[0], (d, config.query_size)), "attention")
        self.key = param(matrix(keys[1], (d, config.kv_size)), "attention")
        self.value = param(matrix(keys[2], (d, config.kv_size)), "attention")
        self.output = param(matrix(keys[3], (config.query_size, d)), "attention")
        if config.attention_bias:
            self.projection_bias = param(jnp.zeros(config.query_size + 2 * config.kv_size), "bias")
            self.output_bias = param(jnp.zeros(d), "bias")
        self.config = config
        self.kind: AttentionKind = kind

    def __call__(
        self, h_bsd: jax.Array, context: Context, layer: LayerCache | None, ops: Ops
    ) -> tuple[jax.Array, LayerCache | None]:
        """`h_bsd` mixed along the sequence, and the layer's decode state where one was given."""
        config, dtype = self.config, h_bsd.dtype
        b, s, _ = h_bsd.shape
        q, k, v = self._project(h_bsd)
        turn = recomputed(_rotate)
        q, k = turn(q, *context.rotary[self.kind]), turn(k, *context.rotary[self.kind])
        if layer is not None:
            layer = decode.write(layer, k, v, jnp.asarray(context.length))
            k, v = layer.k_btkc.astype(dtype), layer.v_btkc.astype(dtype)
        out_bshc = ops.attention(
            q, k, v,
            query_segments_bs=context.segments_bs,
            key_segments_bt=context.key_segments_bt,
            query_offset=context.length,
            window=config.sliding_window if self.kind == "sliding" else None,
        )  # fmt: skip
        out_bsd = checkpoint_name(out_bshc.reshape(b, s, -1) @ self.output[...].astype(dtype), MATMUL_OUTPUT)
        if config.attention_bias:
            out_bsd = out_bsd + self.output_bias[...].astype(dtype)
        return out_bsd, layer

    def _project(self, h_bsd: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries [b, s, h, c], keys and values [b, s, k, c], in the dtype of `h_bsd`."""
        config, dtype = self.config, h_bsd.dtype
        kernels = (self.query, self.key, self.value)
        kernel_dx = jnp.concatenate([kernel[...].astype(dtype) for kernel in kernels], axis=1)
        packed_bsx = checkpoint_name(h_bsd @ kernel_dx, MATMUL_OUTPUT)
        if config.attention_bias:
            packed_bsx = packed_bsx + self.projection_bias[...].astype(dtype)
        packed_bsnc = packed_bsx.reshape(*h_bsd.shape[:2], -1, config.head_dim)
        q, k, v = jnp.split(packed_bsnc, [config.num_query_heads, config.num_query_heads + config.num_kv_heads], axis=2)
        return q, k, v


def _rotate(x_bsnc: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding in fp32, in the dtype of `x_bsnc`."""
    x_bnsc = x_bsnc.astype(accumulation_dtype(x_bsnc.dtype)).transpose(0, 2, 1, 3)
    return rotate(x_bnsc, cos, sin).astype(x_bsnc.dtype).transpose(0, 2, 1, 3)
