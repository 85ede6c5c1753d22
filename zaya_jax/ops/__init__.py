"""Operations with several implementations, and the record `Ops` through which the model calls them.

`Ops` is the only interface between the model and whatever changes how it runs: kernels (`ops.registry`) and parallelism
replace its callables. `LOCAL` has the references, without collectives.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from zaya_jax.ops.attention import PartialAttention, attention, partial_attention, partial_attention_gradient
from zaya_jax.ops.cached_attention import cached_attention
from zaya_jax.ops.cca_mix import Halo, cca_mix
from zaya_jax.ops.experts import dispatch_experts
from zaya_jax.ops.orthogonalize import orthogonalize
from zaya_jax.ops.residual_norm import residual_norm
from zaya_jax.ops.router import router


def _same(x: Any) -> Any:
    return x


def _no_halo(*_: Any) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class Ops:
    """The operations that the model and the optimizer call."""

    attention: Callable[..., jax.Array] = attention  # `ops.attention.attention`
    partial_attention: Callable[..., PartialAttention] = partial_attention  # `ops.attention.partial_attention`
    # `ops.attention.partial_attention_gradient`
    partial_attention_gradient: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] = partial_attention_gradient
    # `ops.cached_attention.cached_attention`
    cached_attention: Callable[..., tuple[jax.Array, tuple[jax.Array, jax.Array]]] = cached_attention
    cca_mix: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] = cca_mix  # `ops.cca_mix.cca_mix`
    residual_norm: Callable[..., tuple[jax.Array, Any]] = residual_norm  # `ops.residual_norm.residual_norm`
    router: Callable[..., tuple[jax.Array, jax.Array]] = router  # `ops.router.router`
    # `ops.experts.dispatch_experts`; a kernel whose output is kept returns it with `MixtureOutput.kept`
    experts: Callable[..., Any] = dispatch_experts
    # Kernels without a gradient for decoding; None without them: `ops.cca_mix.cca_mix_step`, for one token a row,
    # and `ops.router.router_step`.
    cca_mix_step: Callable[..., Any] | None = None
    router_step: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None
    orthogonalize: Callable[..., jax.Array] = orthogonalize  # `ops.orthogonalize.orthogonalize`
    # returns the rows before this device's piece of the sequence, for convolutions and the delayed value; None for a
    # sequence that is not split
    halo: Callable[..., Halo | None] = _no_halo
    # maps the documents of this device's queries to those of the keys it attends to
    key_segments: Callable[[jax.Array], jax.Array] = _same
    gather_layer: Callable[[Any], Any] = _same  # maps a layer's parameters as stored to the ones it computes with
    # `jax.lax.scan`, for the loop over layers; `model.capture` adds outputs to it
    scan_layers: Callable[..., Any] = jax.lax.scan


LOCAL = Ops()
