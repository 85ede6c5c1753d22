"""Parameter counts, FLOPs and cache sizes of an architecture (docs/reference.md §1.1), from its modules' parameters.

A multiply-add counts as two FLOPs. A token passes every matrix and convolution once, but only the expert it is routed
to. Attention modules state the FLOPs of their scores and values. Recomputation in the backward pass is not counted.
"""

import functools
import math
from collections.abc import Mapping

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
    """Return the number of trained parameters of each role."""
    model, totals = abstract_model(config), {}
    role_by_name = roles(model)
    for name, shape in shapes(model).items():
        role, inert = role_by_name[name], math.prod(shape[1:]) if is_inert(name, 0) else 0
        totals[role] = totals.get(role, 0) + math.prod(shape) - inert
    return totals


def total_parameters(config: ModelConfig) -> int:
    """Count the trained parameters, without balancing biases and the inert router state scale of the first layer."""
    return sum(_sizes(config).values())


def active_parameters(config: ModelConfig) -> int:
    """Count the parameters that one token uses, without the embedding."""
    return total_parameters(config) - _sizes(config)["embedding"] - _idle(config)


def _idle(config: ModelConfig) -> int:
    """Count the parameters of the experts that a token does not use."""
    return _sizes(config)["expert"] * (config.num_experts - rows_per_token(config)) // config.num_experts


def prefill_flops_per_token(config: ModelConfig, context: int, head: bool = True) -> float:
    """Count the FLOPs per token of a forward pass, averaged over a sequence of `context` tokens.

    With `head`, the logits of every token count.
    """
    sizes = _sizes(config)
    multiplied = sum(sizes.get(role, 0) for role in _MULTIPLIED) - _idle(config) + head * sizes["embedding"]
    return 2 * multiplied + attention_flops_per_token(config, context)


def attention_flops_per_token(config: ModelConfig, context: int) -> float:
    """Count the FLOPs per token of attention scores and values, which grow with the context."""
    layers = config.layer_kinds
    return config.num_groups * sum(ATTENTION[kind.attention].flops_per_token(config, kind, context) for kind in layers)


def training_flops_per_token(config: ModelConfig, context: int, frozen_head: bool = False) -> float:
    """Count the FLOPs per token of forward and backward passes: three times the forward pass.

    A frozen head, as under adapters, counts twice only. Gradients of adapted matrices are counted, since adapters need
    them; the products with the adapters are not, since their cost does not grow with the number of tokens.
    """
    return 3 * prefill_flops_per_token(config, context) - frozen_head * 2 * _sizes(config)["embedding"]


def cache_bytes_per_token(config: ModelConfig) -> int:
    """Return the bytes that one more cached token takes, over all layers, in bf16."""
    return 2 * (cached_values(config, 1) - cached_values(config, 0))


def cached_values(config: ModelConfig, tokens: int) -> int:
    """Count the values in the decode state of all layers, with a capacity of `tokens` tokens.

    With `tokens=0` these are the values that context parallelism sends between neighbours, besides keys and values.
    """
    cache = jax.eval_shape(functools.partial(init_cache, config, 1, tokens))
    return sum(x.size for x in jax.tree.leaves(cache.layers))


def newton_schulz_flops(config: ModelConfig, steps: int, split: bool, repeats: Mapping[str, int]) -> float:
    """Count the FLOPs of Muon's orthogonalization of all matrices in one training step (docs/reference.md §3.1).

    Each iteration on a p × q matrix (p ≤ q) takes p²q + p³ + p²q multiply-adds, without exploiting symmetry. With
    `split`, an expert's gate and up projections are two matrices. `repeats` tells how many groups of devices do the
    same work on a parameter, by name; one without an entry.
    """
    model, total = abstract_model(config), 0
    role_by_name, parts = roles(model), fused(model) if split else {}
    for name, shape in shapes(model).items():
        if role_by_name[name] in MATRIX_ROLES:
            count = parts.get(name, 1)
            p, q = sorted((shape[-2], shape[-1] // count))
            total += repeats.get(name, 1) * math.prod(shape[:-2]) * count * 2 * (2 * p * p * q + p**3)
    return steps * total
