"""What a model of a given architecture has and costs, from its sizes and parts alone (zaya1.md §1.1).

A multiply-add counts as two operations. Attention counts the keys a query may see, the convolutions are
counted as the two they are, and recomputation in the backward pass is not counted.
"""

from zaya_jax.config import ModelConfig
from zaya_jax.config.model import AttentionKind


def total_parameters(config: ModelConfig) -> int:
    """Trained parameters; neither balancing biases nor the first layer's inert router state scale are counted."""
    return config.vocab_size * config.hidden_size + non_embedding_parameters(config)


def non_embedding_parameters(config: ModelConfig) -> int:
    """`total_parameters` less the tied embedding."""
    d, e = config.hidden_size, config.num_experts
    layer = _attention_parameters(config) + _router_parameters(config) + e * _expert_parameters(config)
    layer += 2 * d  # norms
    outside = d + (config.vocab_size if config.head_bias else 0)  # final norm
    if config.residual_scaling:
        layer += 8 * d
        outside += 2 * d  # input scale and bias
    inert = config.router_size if config.router == "zaya" else 0
    return config.num_layers * layer + outside - inert


def active_parameters(config: ModelConfig) -> int:
    """Parameters outside the embedding that one token, sent to an expert, passes through."""
    idle = config.num_layers * (config.num_experts - 1) * _expert_parameters(config)
    return non_embedding_parameters(config) - idle


def _attention_parameters(config: ModelConfig) -> int:
    c, heads = config.head_dim, config.num_query_heads + config.num_kv_heads
    biases = config.query_size + 2 * config.kv_size + config.hidden_size if config.attention_bias else 0
    if config.attention == "gqa":
        return _projection_parameters(config) + biases
    convolutions = heads * c * (config.depthwise_kernel + 1) + heads * c * (c * config.grouped_kernel + 1)
    return _projection_parameters(config) + convolutions + config.num_kv_heads + biases


def _projection_parameters(config: ModelConfig) -> int:
    return config.hidden_size * (2 * config.query_size + 2 * config.kv_size)


def _router_parameters(config: ModelConfig) -> int:
    """With γ, without the balancing bias."""
    d, r = config.hidden_size, config.router_size
    if config.router == "linear":
        return d * config.num_experts
    return d * r + r + r + r + 2 * (r * r + r) + r * (config.num_experts + 1)


def _expert_parameters(config: ModelConfig) -> int:
    return 3 * config.hidden_size * config.expert_size


def visible_keys(context: int, window: int | None) -> float:
    """Keys a query sees, on average over a sequence of `context` tokens."""
    if window is None or window >= context:
        return (context + 1) / 2
    return (window * (window + 1) / 2 + (context - window) * window) / context


def prefill_flops_per_token(config: ModelConfig, context: int, head: bool = True) -> float:
    """Operations of a forward pass a token, mean over a sequence of `context` tokens.

    Args:
      config: the architecture.
      context: tokens of the sequence.
      head: whether the logits of every token are computed.
    """
    r, heads = config.router_size, config.num_query_heads + config.num_kv_heads
    matrices = _projection_parameters(config) + _expert_parameters(config)
    if config.router == "linear":
        matrices += config.hidden_size * config.num_experts
    else:
        matrices += config.hidden_size * r + 2 * r * r + r * (config.num_experts + 1)
    if config.attention == "cca":
        matrices += heads * config.head_dim * (config.depthwise_kernel + config.head_dim * config.grouped_kernel)
    logits = 2 * config.vocab_size * config.hidden_size if head else 0
    return 2 * matrices * config.num_layers + attention_flops_per_token(config, context) + logits


def attention_flops_per_token(config: ModelConfig, context: int) -> float:
    """Those of `prefill_flops_per_token` that grow with the context: scores and weighted values."""
    windows: dict[AttentionKind, int | None] = {"full": None, "sliding": config.sliding_window}
    seen = sum(visible_keys(context, windows[kind]) for kind in config.period) * config.num_groups
    return 4 * config.query_size * seen


def training_flops_per_token(config: ModelConfig, context: int, frozen_head: bool = False) -> float:
    """Operations of forward and backward passes a token: three times the forward's.

    Of a head that is not trained, as under adapters, only twice. Adapters go through the gradients of their matrices,
    which are counted; the products with the adapters themselves do not grow with the tokens, and are not.
    """
    logits = prefill_flops_per_token(config, context) - prefill_flops_per_token(config, context, head=False)
    return 3 * prefill_flops_per_token(config, context) - frozen_head * logits


def newton_schulz_flops(config: ModelConfig, steps: int = 5, split: bool = False) -> float:
    """Operations of Muon's orthogonalisation of all matrices, a step of training (zaya1.md §3.1).

    A p × q matrix (p ≤ q) takes p²q, p³ and p²q multiply-adds in each of `steps`; symmetry is not made use of.

    Args:
      config: the architecture.
      steps: of the iteration.
      split: whether an expert's gate and up projections are two matrices.
    """
    d, f, r, e = config.hidden_size, config.expert_size, config.router_size, config.num_experts
    gate_up = [(d, f), (d, f)] if split else [(d, 2 * f)]
    matrices = [(d, config.query_size), (d, config.kv_size), (config.query_size, d), *([*gate_up, (f, d)] * e)]
    matrices += [(d, config.kv_size)] if config.attention == "gqa" else [(d, config.kv_size // 2)] * 2
    matrices += [(d, e)] if config.router == "linear" else [(d, r), (r, r), (r, r), (r, e + 1)]
    pairs = [(min(pair), max(pair)) for pair in matrices]
    return config.num_layers * steps * sum(2 * (2 * p * p * q + p**3) for p, q in pairs)


def cache_bytes_per_token(config: ModelConfig, bytes_per_value: int = 2) -> int:
    """Bytes of keys and values a cached token takes over all layers; sliding layers are not cut short."""
    return config.num_layers * 2 * config.kv_size * bytes_per_value


def cache_state_bytes(config: ModelConfig) -> int:
    """Bytes of a sequence's fp32 convolution tails and delayed values, whatever its length; 0 where it has none."""
    if config.attention == "gqa":
        return 0
    rows = config.depthwise_kernel + config.grouped_kernel - 2
    return 4 * config.num_layers * (rows * (config.query_size + config.kv_size) + config.kv_size // 2)
