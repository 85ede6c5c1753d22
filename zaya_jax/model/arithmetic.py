"""What a model of a given architecture has and costs (zaya1.md §1.1), counted from the parameters of its modules.

A multiply-add counts as two operations. A token goes through every matrix and convolution once, but only through the
experts it is sent to; what else attention does, its module says. Recomputation in the backward pass is not counted.
"""

import functools
import math

import jax

from zaya_jax.config import ModelConfig
from zaya_jax.model.experts import rows_per_token
from zaya_jax.model.layers import MATRIX_ROLES, Role
from zaya_jax.model.router import is_inert
from zaya_jax.model.tree import fused, roles, shapes
from zaya_jax.model.zaya import ATTENTION, abstract_model, init_cache

_MULTIPLIED: tuple[Role, ...] = (*MATRIX_ROLES, "convolution")


@functools.lru_cache(maxsize=64)
def _sizes(config: ModelConfig) -> dict[Role, int]:
    """Trained parameters by role, of all layers."""
    model, totals = abstract_model(config), {}
    role_by_name = roles(model)
    for name, shape in shapes(model).items():
        role, inert = role_by_name[name], math.prod(shape[1:]) if is_inert(name, 0) else 0
        totals[role] = totals.get(role, 0) + math.prod(shape) - inert
    return totals


def total_parameters(config: ModelConfig) -> int:
    """Trained parameters; neither balancing biases nor the first layer's inert router state scale are counted."""
    return sum(_sizes(config).values())


def active_parameters(config: ModelConfig) -> int:
    """Parameters outside the embedding that one token, sent to an expert, passes through."""
    return total_parameters(config) - _sizes(config)["embedding"] - _idle(config)


def _idle(config: ModelConfig) -> int:
    """Parameters of the experts that a token does not go to."""
    return _sizes(config)["expert"] * (config.num_experts - rows_per_token(config)) // config.num_experts


def prefill_flops_per_token(config: ModelConfig, context: int, head: bool = True) -> float:
    """Operations of a forward pass a token, mean over a sequence of `context` tokens.

    Args:
      config: the architecture.
      context: tokens of the sequence.
      head: whether the logits of every token are computed.
    """
    sizes = _sizes(config)
    multiplied = sum(sizes.get(role, 0) for role in _MULTIPLIED) - _idle(config) + head * sizes["embedding"]
    return 2 * multiplied + attention_flops_per_token(config, context)


def attention_flops_per_token(config: ModelConfig, context: int) -> float:
    """Those of `prefill_flops_per_token` that grow with the context: no products with parameters."""
    layers = config.layer_kinds
    return config.num_groups * sum(ATTENTION[kind.attention].flops_per_token(config, kind, context) for kind in layers)


def training_flops_per_token(config: ModelConfig, context: int, frozen_head: bool = False) -> float:
    """Operations of forward and backward passes a token: three times the forward's.

    Of a head that is not trained, as under adapters, only twice. Adapters go through the gradients of their matrices,
    which are counted; the products with the adapters themselves do not grow with the tokens, and are not.
    """
    return 3 * prefill_flops_per_token(config, context) - frozen_head * 2 * _sizes(config)["embedding"]


def cache_bytes_per_token(config: ModelConfig) -> int:
    """Bytes that one more cached token takes over all layers, in bf16."""
    return 2 * (cached_values(config, 1) - cached_values(config, 0))


def cached_values(config: ModelConfig, tokens: int) -> int:
    """Values of the decode state of all layers with room for `tokens` tokens.

    Those for none are what a piece of a sequence needs of the tokens before it, beside their keys and values.
    """
    cache = jax.eval_shape(functools.partial(init_cache, config, 1, tokens))
    return sum(x.size for x in jax.tree.leaves(cache.layers))


def newton_schulz_flops(config: ModelConfig, steps: int, split: bool) -> float:
    """Operations of Muon's orthogonalisation of all matrices, a step of training (zaya1.md §3.1).

    A p × q matrix (p ≤ q) takes p²q, p³ and p²q multiply-adds in each of `steps`; symmetry is not made use of.

    Args:
      config: the architecture.
      steps: of the iteration.
      split: whether an expert's gate and up projections are two matrices.
    """
    model, total = abstract_model(config), 0
    role_by_name, parts = roles(model), fused(model) if split else {}
    for name, shape in shapes(model).items():
        if role_by_name[name] in MATRIX_ROLES:
            count = parts.get(name, 1)
            p, q = sorted((shape[-2], shape[-1] // count))
            total += math.prod(shape[:-2]) * count * 2 * (2 * p * p * q + p**3)
    return steps * total
