"""Compressed convolutional attention (docs/reference.md §1.3; arXiv 2510.04476)."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zaya_jax.config import ModelConfig
from zaya_jax.config.model import LayerKind
from zaya_jax.model.attention import Attention, Context, KeyValues
from zaya_jax.model.hf_names import HfTensor, linear, reshaped, same
from zaya_jax.model.layers import param
from zaya_jax.ops import Ops
from zaya_jax.ops.cached_attention import cache_slots, count_kept, last_rows, take_places
from zaya_jax.ops.cca_mix import Halo, MixInputs, MixParts, MixWeights, unpacked
from zaya_jax.ops.parts import part
from zaya_jax.ops.precision import accumulation_dtype


class CCACache(NamedTuple):
    """Decode state of one layer."""

    kv: KeyValues  # keys and values
    u_bwnc: jax.Array  # the last w inputs of the convolutions, fp32 whatever the compute dtype (docs/reference.md §1.3)
    delayed_b1x: jax.Array  # the delayed half of the last value, fp32

    def halo(self, segments_bt: jax.Array, length_b: jax.Array) -> Halo:
        """Return the rows before the next token, which has index `length_b` in its row."""
        place_bw = length_b[:, None] + jnp.arange(-max(self.u_bwnc.shape[1], 1), 0)
        return Halo(self.u_bwnc, take_places(segments_bt, place_bw), self.delayed_b1x)

    def advance(self, kv: KeyValues, u_bsnc: jax.Array, delayed_bsx: jax.Array, kept_b: jax.Array) -> "CCACache":
        """Return the state after `kept_b` of the new tokens, whose keys and values are already in `kv`."""
        return CCACache(kv, last_rows(self.u_bwnc, u_bsnc, kept_b), last_rows(self.delayed_b1x, delayed_bsx, kept_b))


class CCA(Attention):
    """Compressed convolutional attention: queries, keys and values in a compressed latent space, with convolutions."""

    PROJECTIONS = ("query", "key", "value_current", "value_delayed")

    def __init__(self, config: ModelConfig, layer: LayerKind, key: jax.Array) -> None:
        heads, c = config.num_query_heads + config.num_kv_heads, config.head_dim
        k0, k1 = config.depthwise_kernel, config.grouped_kernel
        keys = jax.random.split(key, 7)
        super().__init__(config, layer, list(keys), config.kv_size // 2)
        if config.convolutions:
            bound0, bound1 = k0**-0.5, (c * k1) ** -0.5  # 1 / sqrt(fan-in)
            depthwise = jax.random.uniform(keys[5], (k0, heads, c), jnp.float32, minval=-bound0, maxval=bound0)
            grouped = jax.random.uniform(keys[6], (k1, heads, c, c), jnp.float32, minval=-bound1, maxval=bound1)
            self.depthwise = param(depthwise, "convolution")
            self.depthwise_bias = param(jnp.zeros((heads, c)), "bias")
            self.grouped = param(grouped, "convolution")
            self.grouped_bias = param(jnp.zeros((heads, c)), "bias")
        self.temperature = param(jnp.ones(config.num_kv_heads), "temperature")

    def __call__(self, h_bsd: jax.Array, context: Context, cache: CCACache | None, ops: Ops) -> tuple[jax.Array, Any]:
        """Apply attention; returns [b, s, d] in the dtype of `h_bsd`, and the new decode state (None without one)."""
        config = self.config
        packed_bsy = self.project(h_bsd)
        heads, kv_heads = config.num_query_heads + config.num_kv_heads, config.num_kv_heads
        u_bsnc, _, delayed_bsx = unpacked(packed_bsy, heads, kv_heads, config.head_dim)
        delayed_bias = self.projection_bias[...][-(config.kv_size // 2) :] if config.attention_bias else None
        with part("cca_mix"):
            if cache is None:
                halo = ops.halo(u_bsnc, delayed_bsx, context.segments_bs, config.convolution_reach)
            else:
                halo = cache.halo(context.key_segments_bt, context.length_b)
            rotary = context.rotary[self.layer.rope_base]
            x = MixInputs(packed_bsy, halo, context.segments_bs, rotary, self._weights(), delayed_bias)
            parts = MixParts(config.query_key_mean, config.value_shift)
            if cache is None or ops.cca_mix_step is None or h_bsd.shape[1] > 1:
                q, k, v = ops.cca_mix(x, parts)
            else:
                slots, places = cache.kv.k_btx.shape[1], context.key_segments_bt.shape[1]
                slot_b = cache_slots(context.segments_bs, context.length_b, slots, places)[:, 0]
                (q, (*kv, u_bwnc, delayed_b1x)), k, v = ops.cca_mix_step(x, parts, *cache.kv, slot_b), None, None
                cache = CCACache(KeyValues(*kv), u_bwnc, delayed_b1x)
        out_bsd, kv = self.attend(q, k, v, None if cache is None else cache.kv, context, ops)
        if cache is not None and kv is not None and k is not None:
            cache = cache.advance(kv, u_bsnc, delayed_bsx, count_kept(context.segments_bs))
        return out_bsd, cache

    def _weights(self) -> MixWeights:
        if self.config.convolutions:
            names = ("depthwise", "depthwise_bias", "grouped", "grouped_bias", "temperature")
            return MixWeights(*(getattr(self, name)[...] for name in names))
        heads, c = self.config.num_query_heads + self.config.num_kv_heads, self.config.head_dim
        none_nc, exact = jnp.zeros((heads, c)), self.temperature.dtype
        taps, matrices = jnp.zeros((0, heads, c), exact), jnp.zeros((0, heads, c, c), exact)
        return MixWeights(taps, none_nc, matrices, none_nc, self.temperature[...])

    @staticmethod
    def init_cache(
        config: ModelConfig, layer: LayerKind, batch: int, capacity: int, dtype: jax.typing.DTypeLike
    ) -> CCACache:
        """See `Attention.init_cache`."""
        exact, heads = accumulation_dtype(dtype), config.num_query_heads + config.num_kv_heads
        kv, shape = Attention.init_cache(config, layer, batch, capacity, dtype), (heads, config.head_dim)
        inputs, delayed = (batch, config.convolution_reach, *shape), (batch, 1, config.kv_size // 2)
        return CCACache(kv, jnp.zeros(inputs, exact), jnp.zeros(delayed, exact))

    @staticmethod
    def hf_tensors(config: ModelConfig) -> Iterator[HfTensor]:
        """Yield the module's tensors in a `transformers` folder."""
        d, c, half = config.hidden_size, config.head_dim, config.kv_size // 2
        k0, k1, heads = config.depthwise_kernel, config.grouped_kernel, config.num_query_heads + config.num_kv_heads
        names, widths = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed"), (config.query_size, config.kv_size)
        start = 0
        for name, attribute, width in zip(names, CCA.PROJECTIONS, (*widths, half, half), strict=True):
            yield linear(f"self_attn.qkv_proj.{name}.weight", attribute, width, d)
            if config.attention_bias:
                part = slice(start, start + width)
                yield same(f"self_attn.qkv_proj.{name}.bias", "projection_bias", width, part=part)
            start += width
        yield linear("self_attn.o_proj.weight", "output", d, config.query_size)
        if config.attention_bias:
            yield same("self_attn.o_proj.bias", "output_bias", d)
        convolution, grouped = "self_attn.qkv_proj.conv_qk", (heads, c, c, k1)  # theirs is [head, out, in, tap]
        yield reshaped(f"{convolution}_depthwise.weight", "depthwise", (heads * c, 1, k0), (heads, c, k0), (2, 0, 1))
        yield reshaped(f"{convolution}_grouped.weight", "grouped", (heads * c, c, k1), grouped, (3, 0, 2, 1))
        for name in ("depthwise", "grouped"):
            yield reshaped(f"{convolution}_{name}.bias", f"{name}_bias", (heads * c,), (heads, c), (0, 1))
        yield same("self_attn.qk_norm.temp", "temperature", config.num_kv_heads)
