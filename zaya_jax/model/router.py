"""The ZAYA1 router: down-projection, depth averaging, three-layer MLP, biased top-1 (docs/reference.md §1.4, §1.5)."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from zaya_jax.config import ModelConfig
from zaya_jax.model.hf_names import HfTensor, linear, same
from zaya_jax.model.layers import BalancingBias, RMSNorm, matrix, param
from zaya_jax.ops import Ops
from zaya_jax.ops.experts import MOST_UNSORTED
from zaya_jax.ops.router import RouterWeights, choose_class, matmul

SKIP_BIAS = -1.0  # initial and fixed: the skip class cannot win against an expert with bias 0


class Routing(NamedTuple):
    """A router's choice."""

    expert_bs: jax.Array  # int32 class of each token; e is skip, the class of padding
    weight_bs: jax.Array  # fp32 probability of the choice, without bias, not renormalized; 0 for skip, not for padding
    state_bsr: jax.Array  # fp32 state, which the next layer's router adds to its projection


class Router(nnx.Module):
    """Chooses one of e experts for each token, or to skip."""

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        d, r = config.hidden_size, config.router_size
        keys = jax.random.split(key, 4)
        self.router_layers, self.depth_averaging = config.router_layers, config.depth_averaging
        self.down = param(matrix(keys[0], (d, r)), "router")
        self.down_bias = param(jnp.zeros(r), "bias")
        if config.depth_averaging:
            self.state_scale = param(jnp.ones(r), "scale")  # γ; no effect in the first layer, whose input state is 0
        self.norm = RMSNorm(r, config.norm_eps)
        for index in range(1, config.router_layers):
            setattr(self, f"hidden{index}", param(matrix(keys[index], (r, r)), "router"))
            setattr(self, f"hidden{index}_bias", param(jnp.zeros(r), "bias"))
        self.output = param(matrix(keys[3], (r, config.num_experts + 1)), "router")
        self.balancing_bias = BalancingBias(jnp.zeros(config.num_experts + 1).at[-1].set(SKIP_BIAS))

    def arguments(self, h_bsd: jax.Array, state_bsr: jax.Array) -> tuple[Any, ...]:
        """Apply the down-projection; returns the arguments of `ops.router`."""
        dtype = h_bsd.dtype
        hidden: list[Any] = []
        for index in range(1, self.router_layers):
            hidden += getattr(self, f"hidden{index}")[...].astype(dtype), getattr(self, f"hidden{index}_bias")[...]
        hidden += [None] * (4 - len(hidden))
        scale_r = self.state_scale[...] if self.depth_averaging else jnp.zeros(self.down_bias.shape)
        vectors = self.down_bias[...], scale_r, self.norm.weight[...]
        values: Any = (*vectors, *hidden, self.output[...].astype(dtype))
        return matmul(h_bsd, self.down[...]), state_bsr, RouterWeights(*values), self.norm.eps, dtype

    def probabilities(self, h_bsd: jax.Array, state_bsr: jax.Array, ops: Ops) -> tuple[jax.Array, jax.Array]:
        """Compute the fp32 softmax over the e + 1 classes, and the state for the next layer."""
        return ops.router(*self.arguments(h_bsd, state_bsr))

    def __call__(self, h_bsd: jax.Array, state_bsr: jax.Array, real_bs: jax.Array, ops: Ops) -> Routing:
        """Route every token of `h_bsd`, padding (not `real_bs`) to skip; ties go to the lowest class."""
        if ops.router_step is not None and real_bs.size <= MOST_UNSORTED:
            bias_c = self.balancing_bias[...]
            return Routing(*ops.router_step(*self.arguments(h_bsd, state_bsr), bias_c, real_bs))
        probability, state = self.probabilities(h_bsd, state_bsr, ops)
        return Routing(*choose_class(probability, self.balancing_bias[...], real_bs), state)

    @staticmethod
    def hf_tensors(config: ModelConfig) -> Iterator[HfTensor]:
        """Yield the module's tensors in a `transformers` folder."""
        d, r, classes = config.hidden_size, config.router_size, config.num_experts + 1
        yield linear("mlp.gate.down_proj.weight", "down", r, d)
        yield same("mlp.gate.down_proj.bias", "down_bias", r)
        yield same("mlp.gate.router_states_scale", "state_scale", r)
        yield same("mlp.gate.router_mlp.norm.weight", "norm.weight", r)
        for name, attribute in (("fc1", "hidden1"), ("fc2", "hidden2")):
            yield linear(f"mlp.gate.router_mlp.{name}.weight", attribute, r, r)
            yield same(f"mlp.gate.router_mlp.{name}.bias", f"{attribute}_bias", r)
        yield linear("mlp.gate.router_mlp.out_proj.weight", "output", classes, r)
        yield same("mlp.gate.balancing_biases", "balancing_bias", classes)


def is_inert(name: str, group: int | None) -> bool:
    """True if a parameter, by flat name and index in its stack, is the router state scale of the first layer.

    It scales a state that is zero and stays 1: it is not counted, and `transformers` folders do not have it.
    """
    return (name, group) == ("blocks.0.mixture.router.state_scale", 0)
