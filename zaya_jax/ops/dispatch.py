"""Dropless top-1 dispatch: sort tokens by expert, grouped SwiGLU, put them back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from zaya_jax.ops.grouped_experts import grouped_experts
from zaya_jax.ops.grouped_matmul import grouped_matmul
from zaya_jax.ops.names import MATMUL_OUTPUT
from zaya_jax.ops.target import Target, current_target


def dispatch_experts(
    h_td: jax.Array,
    expert_t: jax.Array,
    weight_t: jax.Array,
    gate_up_edf: jax.Array,
    down_efd: jax.Array,
    *,
    target: Target | None = None,
) -> jax.Array:
    """Each token through the SwiGLU of its expert, times its weight (zaya1.md §1.4, §1.5).

    Args:
      h_td: tokens.
      expert_t: int32 class of each token; values from e on (skip, padding) get zero and cost nothing.
      weight_t: fp32 factor of each token's output.
      gate_up_edf: [e, d, 2f], gate then up.
      down_efd: [e, f, d].
      target: what to compile for; the default device where None.

    Returns:
      [t, d] in the dtype of `h_td`.
    """
    target = target or current_target()
    num_experts = down_efd.shape[0]
    order = jnp.argsort(expert_t, stable=True)
    sizes_e = jnp.zeros(num_experts + 1, jnp.int32).at[expert_t].add(1)[:num_experts]
    platform = target.kernel("grouped_experts")
    if platform is not None and target.kernel("grouped_matmul") is not None:
        order = checkpoint_name(order, MATMUL_OUTPUT)  # 4 bytes a token, for a sort less
        out_td = grouped_experts(h_td, order, sizes_e, weight_t, gate_up_edf, down_efd, platform=platform)
        return checkpoint_name(out_td, MATMUL_OUTPUT)
    back = jnp.argsort(order, stable=True)
    gate_up = grouped_matmul(permute(h_td, order, back), gate_up_edf, sizes_e, target=target)
    gate_up = checkpoint_name(gate_up, MATMUL_OUTPUT)
    hidden_tf = jax.checkpoint(_swiglu, prevent_cse=False)(gate_up)
    out_td = checkpoint_name(grouped_matmul(hidden_tf, down_efd, sizes_e, target=target), MATMUL_OUTPUT)
    return permute(out_td, back, order) * weight_t[:, None].astype(out_td.dtype)


def _swiglu(gate_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, axis=-1)
    return jax.nn.silu(gate) * up


@jax.custom_vjp
def permute(x_td: jax.Array, order: jax.Array, inverse: jax.Array) -> jax.Array:
    """`x_td[order]`; the gradient is a gather by `inverse`, not the scatter autodiff would make."""
    return jnp.take(x_td, order, axis=0, unique_indices=True, mode="clip")


def _permute_forward(x_td: jax.Array, order: jax.Array, inverse: jax.Array) -> tuple[jax.Array, Any]:
    return permute(x_td, order, inverse), (order, inverse)


def _permute_backward(saved: Any, dout_td: jax.Array) -> tuple[Any, ...]:
    order, inverse = saved
    no_gradient = np.zeros(order.shape, jax.dtypes.float0)
    return permute(dout_td, inverse, order), no_gradient, no_gradient


permute.defvjp(_permute_forward, _permute_backward)
