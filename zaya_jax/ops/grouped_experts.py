"""Sorted tokens through the SwiGLU of their expert and back, by kernels: two launches forward, four backward.

Tokens are read from and written to where they stand, so that none is moved between launches, and what is elementwise
is done in the launch of a product: the weight of a token behind the second product, SwiGLU behind the first, SwiGLU's
gradient behind the gradient of the second.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.grouped_matmul import grouped_outer, grouped_product
from pallas_kernels.grouped_swiglu import grouped_swiglu, grouped_swiglu_backward
from zaya_jax.ops.grouped_matmul_kernel import check_dtypes
from zaya_jax.ops.names import MATMUL_OUTPUT


def grouped_experts(
    h_td: jax.Array,
    order_t: jax.Array,
    sizes_e: jax.Array,
    weight_t: jax.Array,
    gate_up_edf: jax.Array,
    down_efd: jax.Array,
    *,
    platform: str,
) -> jax.Array:
    """Each token through the SwiGLU of its expert, times its weight (zaya1.md §1.4, §1.5).

    What the backward wants of the forward, the sorted rows' gate and up [t, 2f], is named `MATMUL_OUTPUT`: where it is
    kept, the backward multiplies nothing again.

    Args:
      h_td: tokens, bf16 or fp32.
      order_t: int32 permutation that sorts them by expert, those of none last.
      sizes_e: int32 tokens of each expert; their sum is at most t.
      weight_t: factor of each token's output, float; in fp32 here.
      gate_up_edf: [e, d, 2f], gate then up, in the dtype of `h_td`.
      down_efd: [e, f, d], likewise.
      platform: 'cuda', 'rocm' or 'interpret'.

    Returns:
      [t, d] in the dtype of `h_td`, zero for tokens of no expert.

    Raises:
      ValueError: dtypes are others, or differ; or shapes do not fit.
    """
    check_dtypes(h_td, gate_up_edf, down_efd)
    (t, d), (e, f, _) = h_td.shape, down_efd.shape
    if gate_up_edf.shape != (e, d, 2 * f) or down_efd.shape[2] != d or sizes_e.shape != (e,):
        raise ValueError(
            "Experts take matrices [e, d, 2f] and [e, f, d], and sizes [e], "
            f"not {gate_up_edf.shape}, {down_efd.shape} and {sizes_e.shape}, for tokens {h_td.shape}."
        )
    if order_t.shape != (t,) or weight_t.shape != (t,):
        raise ValueError(f"Each of {t} tokens has a place and a weight; {order_t.shape} and {weight_t.shape} came.")
    return _experts(platform, h_td, order_t, sizes_e, weight_t.astype(jnp.float32), gate_up_edf, down_efd)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _experts(platform: str, h_td: jax.Array, order_t: jax.Array, sizes_e: jax.Array, weight_t: jax.Array,
             gate_up_edf: jax.Array, down_efd: jax.Array) -> jax.Array:  # fmt: skip
    (hidden_tf,) = grouped_swiglu(h_td, order_t, gate_up_edf, sizes_e, keep=False, platform=platform)
    return grouped_product(hidden_tf, down_efd, sizes_e, order_t=order_t, scale_t=weight_t, platform=platform)


def _forward(platform: str, h_td: jax.Array, order_t: jax.Array, sizes_e: jax.Array, weight_t: jax.Array,
             gate_up_edf: jax.Array, down_efd: jax.Array) -> tuple[jax.Array, Any]:  # fmt: skip
    hidden_tf, gate_up_tf = grouped_swiglu(h_td, order_t, gate_up_edf, sizes_e, keep=True, platform=platform)
    out_td = grouped_product(hidden_tf, down_efd, sizes_e, order_t=order_t, scale_t=weight_t, platform=platform)
    gate_up_tf = checkpoint_name(gate_up_tf, MATMUL_OUTPUT)
    return out_td, (h_td, order_t, sizes_e, weight_t, gate_up_edf, down_efd, gate_up_tf)


def _backward(platform: str, saved: Any, dout_td: jax.Array) -> tuple[Any, ...]:
    h_td, order_t, sizes_e, weight_t, gate_up_edf, down_efd, gate_up_tf = saved
    dgate_up_tf, hidden_tf, dweight_t = grouped_swiglu_backward(
        dout_td, order_t, weight_t, down_efd, gate_up_tf, sizes_e, platform=platform
    )
    outer = functools.partial(grouped_outer, sizes_e=sizes_e, order_t=order_t, platform=platform)
    ddown_efd = outer(hidden_tf, dout_td, moved="y", dtype=down_efd.dtype)
    dgate_up_edf = outer(h_td, dgate_up_tf, moved="x", dtype=gate_up_edf.dtype)
    dh_td = grouped_product(dgate_up_tf, gate_up_edf, sizes_e, transpose=True, order_t=order_t, platform=platform)
    none = [np.zeros(array.shape, jax.dtypes.float0) for array in (order_t, sizes_e)]
    return dh_td, *none, jnp.zeros_like(weight_t).at[order_t].set(dweight_t), dgate_up_edf, ddown_efd


_experts.defvjp(_forward, _backward)
