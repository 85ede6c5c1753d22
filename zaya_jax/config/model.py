"""The model section of a configuration: the architecture."""

from dataclasses import dataclass
from typing import Literal

from zaya_jax.config.bounds import Positive, check_bounds
from zaya_jax.config.checks import field_check, shown

AttentionKind = Literal["full", "sliding"]
AttentionForm = Literal["cca", "gqa", "gqa_qk_norm"]
RouterForm = Literal["zaya", "linear"]


@dataclass(frozen=True)
class LayerKind:
    """The properties that can differ between the layers of a model."""

    attention: AttentionForm  # attention variant
    window: int | None  # number of keys that a query attends to, itself included; None means all previous keys
    rope_base: float  # base of the rotary embedding


MAX_PARAMETERS = 10**14  # sizes of parameters, gradients and optimizer state then fit into 64 bits
# Fields that only the default form of another field has: part → that field.
_ABLATED = {
    **dict.fromkeys(("convolutions", "query_key_mean", "value_shift"), "attention"),
    **dict.fromkeys(("router_layers", "depth_averaging"), "router"),
}


@dataclass(frozen=True)
class ModelConfig:
    """The ZAYA1 architecture (docs/reference.md §1.1). Defaults are those of the released 8B.

    The keys from `attention` to `depth_averaging` are ablations: each can replace or remove one part of ZAYA1.
    """

    vocab_size: Positive[int]  # rows of the embedding, at least as many as the tokenizer has tokens
    hidden_size: Positive[int]  # width of the residual stream
    num_layers: Positive[int]  # layers, each with one attention and one mixture-of-experts sublayer
    num_query_heads: Positive[int]  # query heads of a layer, a multiple of num_kv_heads
    num_kv_heads: Positive[int]  # key heads of a layer, and value heads
    head_dim: Positive[int]  # channels of a head
    num_experts: Positive[int]  # experts of a layer, without the skip class, which only the router has
    expert_size: Positive[int]  # width of an expert's gate projection, and of its up projection
    router_size: Positive[int]  # width of the router's state
    max_positions: Positive[int]  # longest sequence in tokens, for training and generation
    layer_pattern: tuple[AttentionKind, ...] = ("full",)  # kinds of attention, repeated over the depth
    # number of keys that a query of a sliding layer attends to, itself included
    sliding_window: Positive[int] | None = None
    # form of attention; gqa: grouped-query attention; gqa_qk_norm: the same with CCA's norm of queries and keys
    attention: AttentionForm = "cca"
    router: RouterForm = "zaya"  # the form of the router; linear: one matrix, no depth averaging, no skip class
    residual_scaling: bool = True  # scale and shift both terms of each residual sum; false: plain sums
    convolutions: bool = True  # whether CCA mixes queries and keys of neighboring tokens by two convolutions
    query_key_mean: bool = True  # whether CCA adds the mean of queries and keys to both
    value_shift: bool = True  # whether half of CCA's value channels come from the previous token
    router_layers: int = 3  # layers of the zaya router's MLP, the output layer included: 1, 2 or 3
    depth_averaging: bool = True  # whether the zaya router's state includes those of earlier layers
    rope_base: Positive[float] = 5.0e6  # RoPE base of full layers; a phase can set its own
    sliding_rope_base: Positive[float] = 1.0e4  # RoPE base of sliding layers
    rotary_fraction: float = 0.5  # fraction of each head's channels that RoPE rotates, between 0 and 1
    depthwise_kernel: Positive[int] = 2  # tokens that CCA's first convolution reads, the current one included
    grouped_kernel: Positive[int] = 2  # tokens that CCA's second convolution reads, the current one included
    attention_bias: bool = False  # whether the projections of attention have biases
    head_bias: bool = False  # whether logits have a bias
    norm_eps: Positive[float] = 1.0e-5  # added to the mean square in each RMSNorm
    init_std: Positive[float] = 0.02  # standard deviation of the initial embedding; matrices use 1/sqrt(input width)

    def check(self) -> None:
        """Raise `InputError` if the sizes are inconsistent."""
        check_bounds(self, "model")
        must, heads = field_check(self, "model"), self.num_kv_heads
        must("num_query_heads", self.num_query_heads % heads == 0, f"a multiple of model.num_kv_heads ({heads})")
        must("router_layers", 1 <= self.router_layers <= 3, "1, 2 or 3")
        for part, key in _ABLATED.items():
            complete, default = getattr(ModelConfig, key), getattr(ModelConfig, part)
            condition = f"unless model.{key} is {complete} (it is {getattr(self, key)})"
            is_used = getattr(self, key) == complete
            must(part, is_used or getattr(self, part) == default, f"{shown(default)} {condition}")
        halves = "even if model.num_kv_heads is odd: half of the value channels are delayed"
        must("head_dim", (heads * self.head_dim) % 2 == 0, halves)
        must("rotary_fraction", 0 <= self.rotary_fraction <= 1, "between 0 and 1")
        even = f"a fraction of model.head_dim ({self.head_dim}) that is an even number of channels"
        must("rotary_fraction", self.rotary_size % 2 == 0, even)
        divides = len(self.layer_pattern) > 0 and self.num_layers % len(self.layer_pattern) == 0
        must("layer_pattern", divides, f"a list whose length divides model.num_layers ({self.num_layers})")
        experts = 3 * self.num_layers * self.num_experts * self.hidden_size * self.expert_size
        fitting = f"small enough for all experts to have at most {MAX_PARAMETERS:,} parameters together"
        must("num_experts", experts <= MAX_PARAMETERS, f"{fitting} (they would have {experts:,})")
        has_window = self.sliding_window is not None or "sliding" not in self.layer_pattern
        must("sliding_window", has_window, "a positive number of tokens: model.layer_pattern has sliding")

    @property
    def rotary_size(self) -> int:
        """Number of rotated channels per head."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def query_size(self) -> int:
        """Total width of the query heads."""
        return self.num_query_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Total width of the key heads, which is also that of the value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def convolution_reach(self) -> int:
        """Number of previous tokens that a layer's convolutions read."""
        return self.depthwise_kernel + self.grouped_kernel - 2 if self.has_convolutions else 0

    @property
    def has_convolutions(self) -> bool:
        """True if attention has convolutions."""
        return self.attention == "cca" and self.convolutions

    @property
    def period(self) -> tuple[AttentionKind, ...]:
        """The shortest pattern that gives the same layers; one step of the layer scan computes one period."""
        pattern = self.layer_pattern
        for length in range(1, len(pattern) + 1):
            if len(pattern) % length == 0 and pattern == pattern[:length] * (len(pattern) // length):
                return pattern[:length]
        return pattern

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kinds of the layers in one `period`."""
        kinds = {
            "full": LayerKind(self.attention, None, self.rope_base),
            "sliding": LayerKind(self.attention, self.sliding_window, self.sliding_rope_base),
        }
        return tuple(kinds[name] for name in self.period)

    @property
    def num_groups(self) -> int:
        """Number of steps of the layer scan."""
        return self.num_layers // len(self.period)
