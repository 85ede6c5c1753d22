"""The architecture."""

from dataclasses import dataclass
from typing import Literal

from zaya_jax.config.bounds import Positive, check_bounds
from zaya_jax.config.checks import require

AttentionKind = Literal["full", "sliding"]
AttentionForm = Literal["cca", "gqa"]
RouterForm = Literal["zaya", "linear"]


@dataclass(frozen=True)
class LayerKind:
    """The properties in which layers of a model differ.

    Attributes:
      attention: the form of its attention.
      window: keys that a query sees, itself included; None for all before it.
      rope_base: of its rotary embedding.
    """

    attention: AttentionForm
    window: int | None
    rope_base: float


MAX_PARAMETERS = 10**14  # their bytes, gradients and optimizer state are counted in 64 bits


@dataclass(frozen=True)
class ModelConfig:
    """The ZAYA1 architecture (zaya1.md §1.1). Defaults are those of the released 8B.

    `attention`, `router` and `residual_scaling` take a part of it away, to see what the part is worth.
    """

    vocab_size: Positive[int]
    hidden_size: Positive[int]
    num_layers: Positive[int]  # each is one CCA and one mixture-of-experts sublayer
    num_query_heads: Positive[int]
    num_kv_heads: Positive[int]
    head_dim: Positive[int]
    num_experts: Positive[int]  # real experts; the router has one more class, skip
    expert_size: Positive[int]  # width of each of gate and up
    router_size: Positive[int]
    max_positions: Positive[int]
    layer_pattern: tuple[AttentionKind, ...] = ("full",)  # repeated along the depth
    sliding_window: Positive[int] | None = None  # keys a query sees, itself included
    attention: AttentionForm = "cca"  # or grouped-query attention without compression, convolutions and norms
    router: RouterForm = "zaya"  # or one matrix, without depth averaging and without the class skip
    residual_scaling: bool = True  # or plain sums of stream and output
    rope_base: Positive[float] = 5.0e6  # of full layers; a phase may have its own
    sliding_rope_base: Positive[float] = 1.0e4
    rotary_fraction: float = 0.5  # part of each head's channels that carries the position
    depthwise_kernel: Positive[int] = 2
    grouped_kernel: Positive[int] = 2
    attention_bias: bool = False
    head_bias: bool = False
    norm_eps: Positive[float] = 1.0e-5
    init_std: Positive[float] = 0.02  # of the embedding; matrices start at the inverse root of their input's width

    def check(self) -> None:
        """Raise `InputError` where the sizes do not fit one another."""
        check_bounds(self, "model")
        require(self.num_query_heads % self.num_kv_heads == 0, "model.num_query_heads", self.num_query_heads,
                f"a multiple of model.num_kv_heads ({self.num_kv_heads})")  # fmt: skip
        require((self.num_kv_heads * self.head_dim) % 2 == 0, "model.head_dim", self.head_dim,
                "even where model.num_kv_heads is odd, since half of the value is delayed")  # fmt: skip
        require(0 <= self.rotary_fraction <= 1, "model.rotary_fraction", self.rotary_fraction, "between 0 and 1")
        require(self.rotary_size % 2 == 0, "model.rotary_fraction", self.rotary_fraction,
                f"such that its part of model.head_dim ({self.head_dim}) is an even number of channels")  # fmt: skip
        require(len(self.layer_pattern) > 0 and self.num_layers % len(self.layer_pattern) == 0,
                "model.layer_pattern", list(self.layer_pattern),
                f"a list whose length divides model.num_layers ({self.num_layers})")  # fmt: skip
        experts = 3 * self.num_layers * self.num_experts * self.hidden_size * self.expert_size
        require(experts <= MAX_PARAMETERS, "model.num_experts", self.num_experts,
                f"such that the experts of all layers have at most {MAX_PARAMETERS:,} parameters (they would have "
                f"{experts:,})")  # fmt: skip
        if "sliding" in self.layer_pattern:
            require(self.sliding_window is not None, "model.sliding_window",
                    self.sliding_window, "a positive number of tokens, since a layer is sliding")  # fmt: skip

    @property
    def rotary_size(self) -> int:
        """Channels of a head that are rotated."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_query_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all keys (or of all values) together."""
        return self.num_kv_heads * self.head_dim

    @property
    def convolution_reach(self) -> int:
        """Tokens before the current one that a layer's convolutions see."""
        return self.depthwise_kernel + self.grouped_kernel - 2 if self.attention == "cca" else 0

    @property
    def period(self) -> tuple[AttentionKind, ...]:
        """The shortest pattern that gives the same layers: what one step of the layer scan holds."""
        pattern = self.layer_pattern
        for length in range(1, len(pattern) + 1):
            if len(pattern) % length == 0 and pattern == pattern[:length] * (len(pattern) // length):
                return pattern[:length]
        return pattern

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The layers of one `period`."""
        kinds = {
            "full": LayerKind(self.attention, None, self.rope_base),
            "sliding": LayerKind(self.attention, self.sliding_window, self.sliding_rope_base),
        }
        return tuple(kinds[name] for name in self.period)

    @property
    def num_groups(self) -> int:
        """Steps of the layer scan."""
        return self.num_layers // len(self.period)
