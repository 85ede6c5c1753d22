"""Calls of cuDNN's attention to packed documents: causal, with a window, with grouped queries.

XLA makes a graph of cuDNN from a custom call. jax's own function with packed documents is private, and reads wrong keys
where query heads share a key head (jax up to 0.10, https://github.com/jax-ml/jax/pull/39521), so the call is made here.
cuDNN takes documents one after the other, with their lengths and the places of their first elements.
"""

import json
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.attention_tiles import AttentionInputs
from zaya_jax.ops.packing import Packing, without_padding


def cudnn_forward(x: AttentionInputs, packing: Packing) -> tuple[jax.Array, jax.Array]:
    """Compute attention to documents that fit.

    Returns the output [b, s, h, c] in the dtype of the queries, 0 for padding, and the log-sum-exp of each query, fp32
    [b, s, h], for padding that of its attention to padding.
    """
    b, s, h, _ = x.q_bshc.shape
    stats = jax.ShapeDtypeStruct((len(packing.lengths_n), h, s), jnp.float32)
    out, sums_nhs = _call("__cudnn$fmhaSoftmax", _FORWARD, x, packing, (), (x.q_bshc,), (stats,))
    place_t = jnp.arange(b * s) - packing.starts_n[packing.rank_t]
    lse_th = sums_nhs[packing.rank_t, :, place_t]
    return without_padding(x, out), lse_th.reshape(b, s, h)


def cudnn_backward(
    x: AttentionInputs, packing: Packing, o: jax.Array, lse_bsh: jax.Array, do: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradients of queries, keys and values in their dtype, from the results of `cudnn_forward`."""
    b, s, h, _ = x.q_bshc.shape
    token_ns = jnp.minimum(packing.starts_n[:-1, None] + jnp.arange(s), b * s - 1)
    stats_nhs = jnp.moveaxis(lse_bsh.reshape(b * s, h)[token_ns], 2, 1)
    arrays, like = (stats_nhs, without_padding(x, do), o), (x.q_bshc, x.k_btkc, x.v_btkc)
    dq, dk, dv = _call("__cudnn$fmhaSoftmaxBackward", _BACKWARD, x, packing, arrays, like)
    return dq, dk, dv


# Products of arrays [b, s, h, c] and scores [b, h, s, t]: contracted axes, then batch axes, of each side.
Products = dict[str, tuple[tuple[int, int], tuple[list[int], list[int]]]]
_FORWARD: Products = {"bmm1": ((3, 3), ([0, 2], [0, 2])), "bmm2": ((3, 1), ([0, 1], [0, 2]))}
_SIDES = "lhs", "rhs"
_BACKWARD: Products = {
    "bmm1_grad_gemm1": ((2, 1), ([0, 1], [0, 2])),
    "bmm1_grad_gemm2": ((3, 1), ([0, 1], [0, 2])),
    "bmm2_grad_gemm1": ((2, 1), ([0, 1], [0, 2])),
    "bmm2_grad_gemm2": ((3, 3), ([0, 2], [0, 2])),
}


def _call(
    name: str, products: Products, x: AttentionInputs, packing: Packing, arrays: Any, like: Any, more: Any = ()
) -> list[jax.Array]:
    """Call cuDNN; returns arrays like those of `like` [b, s, h, c], which it gives as [b, h, s, c], and `more`."""
    (b, s, h, c), lengths, starts = x.q_bshc.shape, packing.lengths_n, packing.starts_n
    places = (starts * (h * c), starts * (x.k_btkc.shape[2] * c))  # of elements
    heads_first = [jax.ShapeDtypeStruct((b, y.shape[2], y.shape[1], y.shape[3]), y.dtype) for y in like]
    workspace = jax.ShapeDtypeStruct((0,), jnp.uint8)  # XLA gives it its size
    layouts = [*((0, 2, 1, 3) for _ in like), *(None for _ in more), None]
    # XLA's `GpuBackendConfig`; what it leaves out is 0.
    scores = {"element_type": "BF16", "dimensions": [b, h, s, s], "is_dynamic_dimension": [False] * 4}
    config = {
        "algorithm": {"math_type": "TENSOR_OP_MATH", "tuning_knobs": {"17": 1, "24": 0}, "is_cudnn_frontend": True},
        "intermediate_tensor_shape": {**scores, "layout": {"minor_to_major": [3, 2, 1, 0]}},
        "fmha_scale": c**-0.5,
        "is_flash_attention": True,
        "mask_type": "PADDING_CAUSAL",
        "sliding_window_length": x.window or 0,
        "max_seg_per_batch": len(lengths) // b,
    }
    for product, (contracted, batch) in products.items():
        dimensions = {f"{side}_contracting_dimensions": [x] for side, x in zip(_SIDES, contracted, strict=True)}
        dimensions |= {f"{side}_batch_dimensions": axes for side, axes in zip(_SIDES, batch, strict=True)}
        config[f"{product}_dot_dimension_numbers"] = dimensions
    text, out = json.dumps({"cudnn_fmha_backend_config": config}), [*heads_first, *more, workspace]
    call = jax.ffi.ffi_call(name, out, output_layouts=layouts, custom_call_api_version=2, legacy_backend_config=text)
    results = call(x.q_bshc, x.k_btkc, x.v_btkc, *arrays, lengths, lengths, *places)
    return [*(jnp.swapaxes(y, 1, 2) for y in results[: len(like)]), *results[len(like) : -1]]
