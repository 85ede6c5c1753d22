"""Compressed convolutional attention (zaya1.md §1.3; arXiv 2510.04476)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from zaya_jax.config import ModelConfig
from zaya_jax.config.model import AttentionKind
from zaya_jax.model import cache as decode
from zaya_jax.model.cache import LayerCache
from zaya_jax.model.layers import matrix, param, recomputed
from zaya_jax.ops import Ops
from zaya_jax.ops.cca_mix import MixWeights
from zaya_jax.ops.names import MATMUL_OUTPUT


class Context(NamedTuple):
    """What every layer needs to know of the tokens.

    `segments_bs` are their documents (0 is padding), `key_segments_bt` those of all keys that attention is given,
    `rotary` cos and sin for each kind of layer; with a cache, `cached_segments_bt` holds the documents of the tokens
    before (the new ones not yet written), and `length` is the number of tokens before.
    """

    segments_bs: jax.Array
    key_segments_bt: jax.Array
    rotary: dict[AttentionKind, tuple[jax.Array, jax.Array]]
    cached_segments_bt: jax.Array | None = None
    length: jax.Array | int = 0


class CCA(nnx.Module):
    """Attention whose queries, keys and values live in a compressed, convolved latent space."""

    def __init__(self, config: ModelConfig, kind: AttentionKind, key: jax.Array) -> None:
        d = config.hidden_size
        heads, c = config.num_query_heads + config.num_kv_heads, config.head_dim
        k0, k1 = config.depthwise_kernel, config.grouped_kernel
        keys = jax.random.split(key, 7)
        half_value = config.kv_size // 2
        self.query = param(matrix(keys[0], (d, config.query_size)), "attention")
        self.key = param(matrix(keys[1], (d, config.kv_size)), "attention")
        self.value_current = param(matrix(keys[2], (d, half_value)), "attention")
        self.value_delayed = param(matrix(keys[3], (d, half_value)), "attention")
        self.output = param(matrix(keys[4], (config.query_size, d)), "attention")
        bound0, bound1 = k0**-0.5, (c * k1) ** -0.5  # one over the root of what a sum runs over
        depthwise = jax.random.uniform(keys[5], (k0, heads, c), jnp.float32, minval=-bound0, maxval=bound0)
        grouped = jax.random.uniform(keys[6], (k1, heads, c, c), jnp.float32, minval=-bound1, maxval=bound1)
        self.depthwise = param(depthwise, "convolution")
        self.depthwise_bias = param(jnp.zeros((heads, c)), "bias")
        self.grouped = param(grouped, "convolution")
        self.grouped_bias = param(jnp.zeros((heads, c)), "bias")
        self.temperature = param(jnp.ones(config.num_kv_heads), "temperature")
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
        u_bsnc, current_bsx, delayed_bsx, bias = self._project(h_bsd)
        if layer is None or context.cached_segments_bt is None:
            halo = ops.halo(u_bsnc, delayed_bsx, context.segments_bs, decode.tail_rows(config))
        else:
            halo = decode.halo(layer, context.cached_segments_bt, jnp.asarray(context.length))
        weights = MixWeights(self.depthwise[...], self.depthwise_bias[...], self.grouped[...],
                             self.grouped_bias[...], self.temperature[...])  # fmt: skip
        q, k, v = recomputed(ops.cca_mix)(u_bsnc, current_bsx, delayed_bsx, halo, context.segments_bs,
                              context.rotary[self.kind], weights, bias)  # fmt: skip
        if layer is not None:
            layer = decode.advance(layer, k, v, u_bsnc, delayed_bsx, jnp.asarray(context.length))
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

    def _project(self, h_bsd: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """Packed heads of queries and keys, both halves of the value, and the bias of the delayed half."""
        config, dtype = self.config, h_bsd.dtype
        b, s, _ = h_bsd.shape
        kernels = (self.query, self.key, self.value_current, self.value_delayed)
        kernel_dx = jnp.concatenate([kernel[...].astype(dtype) for kernel in kernels], axis=1)
        packed = checkpoint_name(h_bsd @ kernel_dx, MATMUL_OUTPUT)
        qk, half = config.query_size + config.kv_size, config.kv_size // 2
        bias = None
        if config.attention_bias:
            packed = packed + self.projection_bias[...].astype(dtype)
            bias = self.projection_bias[...][qk + half :]
        u_bsx, current_bsx, delayed_bsx = jnp.split(packed, [qk, qk + half], axis=-1)
        return u_bsx.reshape(b, s, -1, config.head_dim), current_bsx, delayed_bsx, bias
