"""What every form of attention has in common: projections, windows, the output, and the facts it states of itself."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from zaya_jax.config import ModelConfig
from zaya_jax.config.model import LayerKind
from zaya_jax.model.cache import KeyValues
from zaya_jax.model.hf_names import no_form
from zaya_jax.model.layers import matrix, param
from zaya_jax.ops import Ops
from zaya_jax.ops.names import MATMUL_OUTPUT


class Context(NamedTuple):
    """What every layer needs to know of the tokens.

    `segments_bs` are their documents (0 is padding), `key_segments_bt` those of all keys that attention is given,
    `rotary` cos and sin by the base of the rotary embedding; with a cache, `cached_segments_bt` holds the documents of
    the tokens before (the new ones not yet written), and `length` is the number of tokens before.
    """

    segments_bs: jax.Array
    key_segments_bt: jax.Array
    rotary: dict[float, tuple[jax.Array, jax.Array]]
    cached_segments_bt: jax.Array | None = None
    length: jax.Array | int = 0


class Attention(nnx.Module):
    """Attention of h query heads to k heads of keys and values, each shared by h / k queries.

    A form of attention is a subclass, listed in `zaya.ATTENTION`. Its call maps (h_bsd, context, decode state or None,
    ops) to the output and the new decode state. It states the operations beside those of its parameters
    (`flops_per_token`), the empty decode state (`init_cache`) and, where there are any, its tensors in a `transformers`
    folder (`hf_tensors`).
    """

    output: nnx.Param
    PROJECTIONS: ClassVar[tuple[str, ...]]  # the parameters that `project` applies, in their order

    def __init__(self, config: ModelConfig, layer: LayerKind, keys: Sequence[jax.Array], value_size: int) -> None:
        """Draw the projections, each value `value_size` wide, and the output from the first of `keys`."""
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

    def project(self, h_bsd: jax.Array) -> jax.Array:
        """All projections side by side in one product, [b, s, x] in the dtype of `h_bsd`."""
        dtype = h_bsd.dtype
        kernel_dx = jnp.concatenate([getattr(self, name)[...].astype(dtype) for name in self.PROJECTIONS], axis=1)
        packed = checkpoint_name(h_bsd @ kernel_dx, MATMUL_OUTPUT)
        return packed + self.projection_bias[...].astype(dtype) if self.config.attention_bias else packed

    def attend(self, q_bshc: jax.Array, k_btkc: jax.Array, v_btkc: jax.Array, context: Context, ops: Ops) -> jax.Array:
        """Attention and the output projection, [b, s, d] in the dtype of the queries."""
        b, s, dtype = *q_bshc.shape[:2], q_bshc.dtype
        out_bshc = ops.attention(
            q_bshc, k_btkc, v_btkc, query_segments_bs=context.segments_bs, key_segments_bt=context.key_segments_bt,
            query_offset=context.length, window=self.layer.window,
        )  # fmt: skip
        out_bsd = checkpoint_name(out_bshc.reshape(b, s, -1) @ self.output[...].astype(dtype), MATMUL_OUTPUT)
        return out_bsd + self.output_bias[...].astype(dtype) if self.config.attention_bias else out_bsd

    @staticmethod
    def flops_per_token(config: ModelConfig, layer: LayerKind, context: int) -> float:
        """Operations of a forward pass a token, mean over `context`: scores and values, no product with a parameter."""
        return 4 * config.query_size * visible_keys(context, layer.window)

    @staticmethod
    def init_cache(config: ModelConfig, batch: int, capacity: int, dtype: jax.typing.DTypeLike) -> Any:
        """The decode state of one layer before the first token.

        Args:
          config: its sizes.
          batch: rows of tokens.
          capacity: tokens of a row.
          dtype: of keys and values.

        Returns:
          A pytree of zeros, [batch, …] each. What does not grow with `capacity` is what a piece of a sequence needs
          of the tokens before it, beside keys and values.
        """
        shape = (batch, capacity, config.num_kv_heads, config.head_dim)
        return KeyValues(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def visible_keys(context: int, window: int | None) -> float:
    """Keys a query sees, on average over a sequence of `context` tokens."""
    if window is None or window >= context:
        return (context + 1) / 2
    return (window * (window + 1) / 2 + (context - window) * window) / context
