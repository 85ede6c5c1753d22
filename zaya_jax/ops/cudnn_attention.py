"""cuDNN's kernels as implementations of `ops.attention`, on NVIDIA GPUs from Hopper on, in bf16.

What cuDNN cannot take runs the Pallas kernels: calls whose keys are at other positions than the queries (a decode step,
context parallelism), and at run time rows of more documents than a call has room for.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import attention_forward
from pallas_kernels.attention_backward import backward_ranges
from pallas_kernels.attention_tiles import AttentionInputs
from pallas_kernels.tiles import Architecture, tile
from zaya_jax.ops.attention import ATTENTION, PartialAttention, gradient, integers, with_segments
from zaya_jax.ops.cudnn import Packing, cudnn_backward, cudnn_forward, pack
from zaya_jax.ops.names import MATMUL_OUTPUT
from zaya_jax.ops.operation import Kernel

OLDEST = 90  # compute capability × 10 from which cuDNN has packed documents
MOST_ELEMENTS = 2**31  # of queries, whose places are int32
_TILE = "cudnn_documents"
_PALLAS = ATTENTION.kernels[0]


def _unsupported(architecture: str, *qkv: Any, **options: Any) -> str:
    digits = architecture.removeprefix("sm_")
    if not digits.isdecimal() or int(digits) < OLDEST:
        return f"cuDNN's attention to packed documents needs an NVIDIA GPU of sm_{OLDEST} or later, not {architecture}."
    if (dtype := jnp.dtype(qkv[0].dtype)) != jnp.bfloat16:
        return f"cuDNN's attention needs arrays in bfloat16, not {dtype.name}."
    return _PALLAS.supports(architecture, *qkv, **options)


def _run(architecture: Architecture, *qkv: Any, backward: bool, **options: Any) -> jax.Array:
    x = AttentionInputs(*qkv, **options)
    same_places = isinstance(x.query_offset, int) and x.query_offset == 0 and x.q_bshc.shape[1] == x.k_btkc.shape[1]
    if not same_places or x.q_bshc.size >= MOST_ELEMENTS:
        return _PALLAS.run(architecture, *qkv, **options)
    return _attention(architecture, backward, integers(with_segments(x)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(architecture: Architecture, backward: bool, x: AttentionInputs) -> jax.Array:
    return _forward_rule(architecture, backward, x)[0]


def _forward_rule(architecture: Architecture, _backward: bool, x: AttentionInputs) -> tuple[jax.Array, Any]:
    def by_pallas(x: AttentionInputs, _: Packing) -> tuple[jax.Array, jax.Array]:
        return attention_forward(x, dtype=x.q_bshc.dtype, architecture=architecture)

    (tokens,), (b, s) = tile(_TILE, architecture, x.q_bshc.dtype).sizes, x.q_bshc.shape[:2]
    packing = pack(x.query_segments_bs, x.key_segments_bt, b * max(s // tokens, 2))
    o, lse = jax.lax.cond(packing.fits, cudnn_forward, by_pallas, x, packing)
    bounds = backward_ranges(x, architecture=architecture)
    # The packing and the bounds are the same for all layers: saved, they are computed once.
    o, lse, packing, bounds = checkpoint_name((o, lse, packing, bounds), MATMUL_OUTPUT)
    return o, (x, packing, bounds, o, lse)


def _backward_rule(architecture: Architecture, backward: bool, saved: Any, do: jax.Array) -> tuple[AttentionInputs]:
    x, packing, bounds, o, lse = saved

    def by_pallas(*_: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        return gradient(architecture, x, bounds, PartialAttention(o, lse), do, x.q_bshc.dtype)

    arguments = (x, packing, o, lse, do)
    gradients = jax.lax.cond(packing.fits, cudnn_backward, by_pallas, *arguments) if backward else by_pallas()
    return (AttentionInputs(*gradients, query_offset=None, window=x.window),)  # None means zero


_attention.defvjp(_forward_rule, _backward_rule)


def _kernel(name: str, backward: bool) -> Kernel:
    run = functools.partial(_run, backward=backward)
    return Kernel(name, run, _unsupported, (_TILE,), ("cuda",), __name__, _PALLAS.name)


CUDNN = (_kernel("cudnn", True), _kernel("cudnn_forward", False))
