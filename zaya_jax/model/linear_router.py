"""A linear router: one matrix, softmax, top-1 (arXiv 2101.03961), with balancing bias (docs/reference.md §1.4).

Like ZAYA1's router it has an fp32 softmax, the unbiased probability as weight, and a balancing bias with an entry for
skip.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from zaya_jax.config import ModelConfig
from zaya_jax.model.hf_names import no_form
from zaya_jax.model.layers import BalancingBias, matrix, param
from zaya_jax.model.router import SKIP_BIAS, Routing
from zaya_jax.ops import Ops
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.ops.router import choose_class


class LinearRouter(nnx.Module):
    """Chooses one of e experts. It never skips, and passes the router state through."""

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        self.output = param(matrix(key, (config.hidden_size, config.num_experts)), "router")
        self.balancing_bias = BalancingBias(jnp.zeros(config.num_experts + 1).at[-1].set(SKIP_BIAS))

    hf_tensors = staticmethod(no_form)

    def probabilities(self, h_bsd: jax.Array) -> jax.Array:
        """Compute the fp32 softmax over the e experts; the matmul is in the dtype of `h_bsd` with fp32 sums."""
        output_de, sums = self.output[...].astype(h_bsd.dtype), accumulation_dtype(h_bsd.dtype)
        logits = jnp.matmul(h_bsd, output_de, preferred_element_type=sums)
        return jax.nn.softmax(logits, axis=-1)

    def __call__(self, h_bsd: jax.Array, state_bsr: jax.Array, real_bs: jax.Array, ops: Ops) -> Routing:
        """Route every token of `h_bsd`, padding to skip; ties go to the lowest class. `ops` is not used."""
        return Routing(*choose_class(self.probabilities(h_bsd), self.balancing_bias[...], real_bs), state_bsr)
