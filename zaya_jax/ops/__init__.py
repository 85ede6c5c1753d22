"""Operations with more than one implementation, and the record through which the model reaches them.

`Ops` is the one seam between the model and everything that changes how it runs: kernels and parallelism
put other callables into it. Those of `LOCAL` do nothing collective.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.ops.attention import Part, attention, attention_part, attention_part_gradient
from zaya_jax.ops.attention_kernel import attention_kernel, attention_part_gradient_kernel, attention_part_kernel
from zaya_jax.ops.cca_mix import Halo, cca_mix
from zaya_jax.ops.cca_mix_kernel import cca_mix_kernel
from zaya_jax.ops.dispatch import dispatch_experts
from zaya_jax.ops.momentum import step_momentum
from zaya_jax.ops.norm import rms_norm
from zaya_jax.ops.orthogonalize import orthogonalize
from zaya_jax.ops.residual_norm import residual_norm
from zaya_jax.ops.residual_norm_kernel import residual_norm_kernel
from zaya_jax.ops.target import Target


def no_halo(u_bsnc: jax.Array, delayed_bsx: jax.Array, segments_bs: jax.Array, rows: int) -> Halo:
    """The halo where the sequence is whole: zeros, of no document."""
    b = u_bsnc.shape[0]
    # At least one row of segments, since the value shift looks one token back whatever the kernels.
    return Halo(
        jnp.zeros((b, rows, *u_bsnc.shape[2:]), u_bsnc.dtype),
        jnp.zeros((b, max(rows, 1)), segments_bs.dtype),
        jnp.zeros((b, 1, delayed_bsx.shape[2]), delayed_bsx.dtype),
    )


def _same(x: Any) -> Any:
    return x


@dataclasses.dataclass(frozen=True)
class Ops:
    """What the model calls.

    Attributes:
      attention: `ops.attention.attention`.
      attention_part: `ops.attention.attention_part`.
      attention_part_gradient: `ops.attention.attention_part_gradient`.
      cca_mix: `ops.cca_mix.cca_mix`.
      rms_norm: `ops.norm.rms_norm`.
      residual_norm: `ops.residual_norm.residual_norm`.
      experts: `ops.dispatch.dispatch_experts`.
      momentum: `ops.momentum.step_momentum`.
      orthogonalize: `ops.orthogonalize.orthogonalize`.
      halo: rows of the convolution and of the delayed value before this piece of the sequence.
      key_segments: from the documents of this piece of the sequence to those of the keys that attention is given.
      gather_layer: from a layer's parameters as stored to those it computes with.
    """

    attention: Callable[..., jax.Array] = attention
    attention_part: Callable[..., Part] = attention_part
    attention_part_gradient: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] = attention_part_gradient
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


_KERNELS: dict[str, dict[str, Callable[..., Any]]] = {
    "residual_norm": {"residual_norm": residual_norm_kernel},
    "cca_mix": {"cca_mix": cca_mix_kernel},
    "attention": {
        "attention": attention_kernel,
        "attention_part": attention_part_kernel,
        "attention_part_gradient": attention_part_gradient_kernel,
    },
}


def ops_for(target: Target) -> Ops:
    """`LOCAL` compiled for `target`, whatever the first device of the process is, by the kernels there are for it."""
    found: dict[str, Callable[..., Any]] = {
        "experts": functools.partial(dispatch_experts, target=target),
        "momentum": functools.partial(step_momentum, platform=target.kernel("momentum")),
        "orthogonalize": functools.partial(orthogonalize, target=target),
    }
    for operation, kernels in _KERNELS.items():
        if platform := target.kernel(operation):
            found |= {name: functools.partial(kernel, platform=platform) for name, kernel in kernels.items()}
    return dataclasses.replace(LOCAL, **found)
