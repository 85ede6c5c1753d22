"""Mixture of experts: a router and e SwiGLU experts, top-1, dropless (docs/reference.md §1.4)."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from zaya_jax.config import ModelConfig
from zaya_jax.model.hf_names import HfTensor, linear, within
from zaya_jax.model.layers import matrix, param
from zaya_jax.model.linear_router import LinearRouter
from zaya_jax.model.router import Router
from zaya_jax.ops import Ops
from zaya_jax.ops.parts import part

ROUTERS = {"zaya": Router, "linear": LinearRouter}
HF_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")  # one tensor for all experts of a layer


def rows_per_token(config: ModelConfig) -> int:
    """Return the number of experts that process each token (top-k)."""
    del config
    return 1


class Experts(nnx.Module):
    """The stacked matrices of all experts of a layer."""

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        e, d, f = config.num_experts, config.hidden_size, config.expert_size
        key_up, key_down = jax.random.split(key)
        self.gate_up = param(matrix(key_up, (e, d, 2 * f)), "expert", parts=2)
        self.down = param(matrix(key_down, (e, f, d)), "expert")

    @staticmethod
    def hf_tensors(config: ModelConfig) -> Iterator[HfTensor]:
        """Yield the module's tensors in a `transformers` folder."""
        e, d, f = config.num_experts, config.hidden_size, config.expert_size
        yield linear(HF_EXPERTS[0], "gate_up", e, 2 * f, d)
        yield linear(HF_EXPERTS[1], "down", e, d, f)


class MixtureOutput(NamedTuple):
    """The results of a mixture of experts."""

    out_bsd: jax.Array  # to be merged into the residual stream
    state_bsr: jax.Array  # of the router, for the next layer's
    counts_e: jax.Array  # int32 [e + 1], tokens of each class, skip last
    kept: Any  # reference to outputs of all layers, [l, b · s, d], and the index of this one; or nothing


class MixtureOfExperts(nnx.Module):
    """A router and its experts."""

    def __init__(self, config: ModelConfig, key: jax.Array) -> None:
        key_router, key_experts = jax.random.split(key)
        self.router = ROUTERS[config.router](config, key_router)
        self.experts = Experts(config, key_experts)
        self.num_experts = config.num_experts  # of all devices; a device may hold a part of them

    def __call__(self, h_bsd: jax.Array, state_bsr: jax.Array, segments_bs: jax.Array, ops: Ops) -> MixtureOutput:
        """Apply the mixture; padding goes through no expert and is not counted."""
        b, s, d = h_bsd.shape
        real = segments_bs != 0
        with part("router"):
            routing = self.router(h_bsd, state_bsr, real, ops)
        matrices = (x.get_value().astype(h_bsd.dtype) for x in (self.experts.gate_up, self.experts.down))
        with part("dispatch"):
            classes = jnp.arange(self.num_experts + 1, dtype=jnp.int32)
            routed = real[..., None] & (routing.expert_bs[..., None] == classes)
            counts = routed.reshape(-1, len(classes)).sum(0, dtype=jnp.int32)
        expert_t, weight_t = routing.expert_bs.reshape(-1), routing.weight_bs.reshape(-1)
        out = ops.experts(h_bsd.reshape(b * s, d), expert_t, weight_t, *matrices)
        out_td, *kept = out if isinstance(out, tuple) else (out,)
        return MixtureOutput(out_td.reshape(b, s, d), routing.state_bsr, counts, kept)

    @staticmethod
    def hf_tensors(config: ModelConfig) -> Iterator[HfTensor]:
        """Yield the module's tensors in a `transformers` folder."""
        yield from within("router", ROUTERS[config.router].hf_tensors(config))
        yield from within("experts", Experts.hf_tensors(config))
