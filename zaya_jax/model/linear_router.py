"""The router of most mixtures: one matrix, softmax, biased top-1 (arXiv 2101.03961; the bias is that of zaya1.md §1.4).

It keeps of ZAYA1's router what the rest of the model relies on: fp32 softmax, the unbiased probability as the
weight, and the balancing bias with an entry for skip.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from zaya_jax.config import ModelConfig
from zaya_jax.model.hf_names import no_form
from zaya_jax.model.layers import BalancingBias, matrix, param
from zaya_jax.model.router import SKIP_BIAS, Routing, choose_class
from zaya_jax.ops import Ops
from zaya_jax.ops.precision import accumulation_dtype


class LinearRouter(nnx.Module):
    """Chooses one of e experts; never skips, and neither reads nor changes the state."""

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        self.output = param(matrix(key, (config.hidden_size, config.num_experts)), "router")
        self.balancing_bias = BalancingBias(jnp.zeros(config.num_experts + 1).at[-1].set(SKIP_BIAS))

    hf_tensors = staticmethod(no_form)

    def probabilities(self, h_bsd: jax.Array) -> jax.Array:
        """fp32 softmax over the e experts; the product is in the dtype of `h_bsd`, its sum in fp32."""
        logits = jnp.matmul(
            h_bsd, self.output[...].astype(h_bsd.dtype), preferred_element_type=accumulation_dtype(h_bsd.dtype)
        )
        return jax.nn.softmax(logits, axis=-1)

    def __call__(self, h_bsd: jax.Array, state_bsr: jax.Array, ops: Ops) -> Routing:
        """Route every token of `h_bsd`; ties go to the lowest class. `ops` is what other routers call."""
        return Routing(*choose_class(self.probabilities(h_bsd), self.balancing_bias[...]), state_bsr)
