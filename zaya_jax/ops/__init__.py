"""Operations with more than one implementation, and the record through which the model reaches them.

`Ops` is the one seam between the model and everything that changes how it runs: kernels (`ops.registry`) and
parallelism put other callables into it. Those of `LOCAL` are the references, and do nothing collective.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from zaya_jax.ops.attention import PartialAttention, attention, partial_attention, partial_attention_gradient
from zaya_jax.ops.cca_mix import Halo, cca_mix, no_halo
from zaya_jax.ops.experts import dispatch_experts
from zaya_jax.ops.momentum import step_momentum
from zaya_jax.ops.norm import rms_norm
from zaya_jax.ops.orthogonalize import orthogonalize
from zaya_jax.ops.residual_norm import residual_norm


def _same(x: Any) -> Any:
    return x


@dataclasses.dataclass(frozen=True)
class Ops:
    """What the model calls.

    Attributes:
      attention: `ops.attention.attention`.
      partial_attention: `ops.attention.partial_attention`.
      partial_attention_gradient: `ops.attention.partial_attention_gradient`.
      cca_mix: `ops.cca_mix.cca_mix`.
      rms_norm: `ops.norm.rms_norm`.
      residual_norm: `ops.residual_norm.residual_norm`.
      experts: `ops.experts.dispatch_experts`.
      momentum: `ops.momentum.step_momentum`.
      orthogonalize: `ops.orthogonalize.orthogonalize`.
      halo: rows of the convolution and of the delayed value before this piece of the sequence.
      key_segments: from the documents of this piece of the sequence to those of the keys that attention is given.
      gather_layer: from a layer's parameters as stored to those it computes with.
    """

    attention: Callable[..., jax.Array] = attention
    partial_attention: Callable[..., PartialAttention] = partial_attention
    partial_attention_gradient: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] = partial_attention_gradient
    cca_mix: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] = cca_mix
    rms_norm: Callable[..., jax.Array] = rms_norm
    residual_norm: Callable[..., tuple[jax.Array, jax.Array]] = residual_norm
    experts: Callable[..., jax.Array] = dispatch_experts
    momentum: Callable[..., tuple[jax.Array, jax.Array]] = step_momentum
    orthogonalize: Callable[..., jax.Array] = orthogonalize
    halo: Callable[..., Halo] = no_halo
    key_segments: Callable[[jax.Array], jax.Array] = _same
    gather_layer: Callable[[Any], Any] = _same


LOCAL = Ops()
