"""The base class of attention modules: projections, window, output, FLOPs and decode state."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from zaya_jax.config import ModelConfig
from zaya_jax.config.model import LayerKind
from zaya_jax.model.hf_names import no_form
from zaya_jax.model.layers import matrix, param
from zaya_jax.ops import Ops
from zaya_jax.ops.attention import AttentionInputs
from zaya_jax.ops.names import MATMUL_OUTPUT


class KeyValues(NamedTuple):
    """Keys and values of one layer in a cache, heads side by side: x = k·c.

    With the heads on an axis of their own, XLA would copy the whole cache at each decode step.
    """

    k_btx: jax.Array
    v_btx: jax.Array


class Context(NamedTuple):
    """The tokens as every layer sees them."""

    segments_bs: jax.Array  # int32 document of each token; 0 is padding
    key_segments_bt: jax.Array  # int32 document of each key; with a cache, of each place of a row, 0 where empty
    rotary: dict[float, tuple[jax.Array, jax.Array]]  # cos and sin tables by RoPE base
    length_b: Any = 0  # with a cache, int32 [b], the number of tokens that each row has before the new ones


class Attention(nnx.Module):
    """Attention with h query heads and k heads of keys and values, each shared by h / k query heads.

    Each variant is a subclass, listed in `zaya.ATTENTION`. Calling it maps (h_bsd, context, decode state or None, ops)
    to the output and the new decode state. It defines its FLOPs besides those of its parameters (`flops_per_token`),
    its empty decode state (`init_cache`) and its tensors in a `transformers` folder (`hf_tensors`), if it has any.
    """

    output: nnx.Param
    PROJECTIONS: tuple[str, ...]  # names of the parameters that `project` applies, in order

    def __init__(self, config: ModelConfig, layer: LayerKind, keys: Sequence[jax.Array], value_size: int) -> None:
        """Draw the projections, with values of width `value_size`, and the output from the first of `keys`."""
        d = config.hidden_size
        widths = {"query": config.query_size, "key": config.kv_size}
        for name, key in zip((*self.PROJECTIONS, "output"), keys, strict=False):
            shape = (config.query_size, d) if name == "output" else (d, widths.get(name, value_size))
            setattr(self, name, param(matrix(key, shape), "attention"))
        if config.attention_bias:
            self.projection_bias = param(jnp.zeros(config.query_size + 2 * config.kv_size), "bias")
            self.output_bias = param(jnp.zeros(d), "bias")
        self.config = config
        self.layer = layer

    hf_tensors = staticmethod(no_form)

    def join_projections(self) -> None:
        """Replace the projections by one parameter, `query`."""
        joined = jnp.concatenate([getattr(self, name)[...] for name in self.PROJECTIONS], axis=-1)
        for name in self.PROJECTIONS:
            delattr(self, name)
        self.query, self.PROJECTIONS = param(joined, "attention"), ("query",)

    def project(self, h_bsd: jax.Array) -> jax.Array:
        """Apply all projections in one matmul; returns [b, s, x] in the dtype of `h_bsd`."""
        dtype = h_bsd.dtype
        kernel_dx = jnp.concatenate([getattr(self, name)[...].astype(dtype) for name in self.PROJECTIONS], axis=1)
        packed = checkpoint_name(h_bsd @ kernel_dx, MATMUL_OUTPUT)
        return packed + self.projection_bias[...].astype(dtype) if self.config.attention_bias else packed

    def attend(
        self, q_bshc: jax.Array, k_bskc: Any, v_bskc: Any, cache: Any, context: Context, ops: Ops
    ) -> tuple[jax.Array, KeyValues | None]:
        """Apply attention and the output projection; keys and values are None if the cache has them already.

        Returns [b, s, d] in the dtype of the queries, and the cache with the new keys and values (None without one).
        """
        segments = context.segments_bs, context.key_segments_bt
        x = AttentionInputs(q_bshc, k_bskc, v_bskc, *segments, context.length_b, self.layer.window)
        if cache is None:
            out_bshc = x.call(ops.attention)
        else:
            out_bshc, kv = ops.cached_attention(ops.attention, x, cache)
            cache = KeyValues(*kv)
        merged, dtype = out_bshc.reshape(*q_bshc.shape[:2], -1), q_bshc.dtype
        out_bsd = checkpoint_name(merged @ self.output[...].astype(dtype), MATMUL_OUTPUT)
        if self.config.attention_bias:
            out_bsd = out_bsd + self.output_bias[...].astype(dtype)
        return out_bsd, cache

    @staticmethod
    def flops_per_token(config: ModelConfig, layer: LayerKind, context: int) -> float:
        """Count the forward FLOPs per token of scores and values, averaged over a sequence of `context` tokens."""
        return 4 * config.query_size * visible_keys(context, layer.window)

    @staticmethod
    def init_cache(
        config: ModelConfig, layer: LayerKind, batch: int, capacity: int, dtype: jax.typing.DTypeLike
    ) -> Any:
        """Make the decode state of one layer before the first token, for `batch` rows of `capacity` tokens.

        A pytree of zeros, [batch, …] each, keys and values in `dtype`, with at most the tokens of a window. Leaves that
        do not grow with `capacity` are what context parallelism sends between neighbours, besides these.
        """
        slots = capacity if layer.window is None else min(layer.window, capacity)
        shape = (batch, slots, config.kv_size)
        return KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def visible_keys(context: int, window: int | None) -> float:
    """Return the mean number of keys that a query sees in a sequence of `context` tokens."""
    if window is None or window >= context:
        return (context + 1) / 2
    return (window * (window + 1) / 2 + (context - window) * window) / context
