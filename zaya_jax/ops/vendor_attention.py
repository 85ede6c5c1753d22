"""The kernels of cuDNN and of AITER as implementations of `ops.attention`, in bf16.

What a library cannot take runs the Pallas kernels: calls whose keys are at other positions than the queries (a decode
step, context parallelism), and at run time rows of more documents than a call has room for.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.attention import attention_forward
from pallas_kernels.attention_backward import backward_ranges
from pallas_kernels.attention_tiles import AttentionInputs
from pallas_kernels.tiles import Architecture, tile
from zaya_jax.ops.aiter import aiter_backward, aiter_forward, unavailable
from zaya_jax.ops.attention import ATTENTION, PartialAttention, gradient, integers, with_segments
from zaya_jax.ops.cudnn import cudnn_backward, cudnn_forward
from zaya_jax.ops.names import MATMUL_OUTPUT
from zaya_jax.ops.operation import Kernel
from zaya_jax.ops.packing import Packing, pack

OLDEST = 90  # compute capability × 10 from which cuDNN has packed documents
AMD = ("gfx942", "gfx950")  # architectures that jax-aiter can be built for
MOST_ELEMENTS = 2**31  # of queries, whose places are int32
_TILE = "packed_documents"
_PALLAS = ATTENTION.kernels[0]


class Library(NamedTuple):
    """What computes attention to documents that fit."""

    forward: Callable[..., Any]  # of inputs and packing: output and log-sum-exp
    # also of output, log-sum-exp and the output's gradient: gradients of queries, keys and values; None leaves them to
    # the Pallas kernels
    backward: Callable[..., Any] | None


def _cudnn_unsupported(architecture: str) -> str:
    digits = architecture.removeprefix("sm_")
    if digits.isdecimal() and int(digits) >= OLDEST:
        return ""
    return f"cuDNN's attention to packed documents needs an NVIDIA GPU of sm_{OLDEST} or later, not {architecture}."


def _aiter_unsupported(architecture: str) -> str:
    if architecture not in AMD:
        return f"AITER's attention to packed documents needs {' or '.join(AMD)}, not {architecture}."
    return unavailable()


def _unsupported(of_device: Callable[[str], str], architecture: str, *qkv: Any, **options: Any) -> str:
    if (dtype := jnp.dtype(qkv[0].dtype)) != jnp.bfloat16:
        return f"The attention of cuDNN and AITER needs arrays in bfloat16, not {dtype.name}."
    return _PALLAS.supports(architecture, *qkv, **options) or of_device(architecture)


def _run(library: Library, architecture: Architecture, *qkv: Any, **options: Any) -> jax.Array:
    x = AttentionInputs(*qkv, **options)
    same_places = isinstance(x.query_offset, int) and x.query_offset == 0 and x.q_bshc.shape[1] == x.k_btkc.shape[1]
    if not same_places or x.q_bshc.size >= MOST_ELEMENTS:
        return _PALLAS.run(architecture, *qkv, **options)
    return _attention(library, architecture, integers(with_segments(x)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(library: Library, architecture: Architecture, x: AttentionInputs) -> jax.Array:
    return _forward_rule(library, architecture, x)[0]


def _forward_rule(library: Library, architecture: Architecture, x: AttentionInputs) -> tuple[jax.Array, Any]:
    def by_pallas(x: AttentionInputs, _: Packing) -> tuple[jax.Array, jax.Array]:
        return attention_forward(x, dtype=x.q_bshc.dtype, architecture=architecture)

    (tokens,), (b, s) = tile(_TILE, architecture, x.q_bshc.dtype).sizes, x.q_bshc.shape[:2]
    packing = pack(x.query_segments_bs, x.key_segments_bt, b * max(s // tokens, 2))
    o, lse = jax.lax.cond(packing.fits, library.forward, by_pallas, x, packing)
    bounds = backward_ranges(x, architecture=architecture)
    # The packing and the bounds are the same for all layers: saved, they are computed once.
    o, lse, packing, bounds = checkpoint_name((o, lse, packing, bounds), MATMUL_OUTPUT)
    return o, (x, packing, bounds, o, lse)


def _backward_rule(library: Library, architecture: Architecture, saved: Any, do: jax.Array) -> tuple[AttentionInputs]:
    x, packing, bounds, o, lse = saved

    def by_pallas(*_: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        return gradient(architecture, x, bounds, PartialAttention(o, lse), do, x.q_bshc.dtype)

    arguments, run = (x, packing, o, lse, do), library.backward
    gradients = by_pallas() if run is None else jax.lax.cond(packing.fits, run, by_pallas, *arguments)
    return (AttentionInputs(*gradients, query_offset=None, window=x.window),)  # None means zero


_attention.defvjp(_forward_rule, _backward_rule)


def _kernels(
    name: str, platform: str, forward: Callable[..., Any], backward: Callable[..., Any], of_device: Callable[[str], str]
) -> list[Kernel]:
    """Return the kernel of a library with both of its passes, and the one with its forward pass alone."""
    supports = functools.partial(_unsupported, of_device)
    libraries = {name: Library(forward, backward), f"{name}_forward": Library(forward, None)}
    return [Kernel(key, functools.partial(_run, library), supports, (_TILE,), (platform,), __name__, _PALLAS.name)
            for key, library in libraries.items()]  # fmt: skip


LIBRARIES = (
    *_kernels("cudnn", "cuda", cudnn_forward, cudnn_backward, _cudnn_unsupported),
    *_kernels("aiter", "rocm", aiter_forward, aiter_backward, _aiter_unsupported),
)
