"""Which tensor of a `transformers` ZAYA folder is which parameter here (zaya1.md §12.1).

Linear weights are [out, in] there and [in, out] here, and the convolutions' taps come last there and
first here; nothing is computed, so that a round trip keeps every bit.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from zaya_jax.config import ModelConfig

Change = Callable[[np.ndarray], np.ndarray]

FIRST_GAMMA = "blocks.0.mixture.router.state_scale"  # its first layer's is inert, stands in no folder, and is one


def is_bias(leaf: str) -> bool:
    """Whether a parameter, by its flat name, is a balancing bias."""
    return leaf.rpartition(".")[2] == "balancing_bias"


EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")  # of a layer, all experts in one tensor


class Tensor(NamedTuple):
    """One tensor of the folder.

    Attributes:
      name: its name there.
      path: attributes that lead to the parameter here; the position in the period follows 'blocks'.
      group: index in the parameter's stack, None where it is not stacked.
      shape: its shape there.
      to_ours, to_theirs: between the two layouts.
      part: the slice of the parameter it fills, along the first axis behind the stack.
    """

    name: str
    path: tuple[str | int, ...]
    group: int | None
    shape: tuple[int, ...]
    to_ours: Change
    to_theirs: Change
    part: slice | None = None

    @property
    def leaf(self) -> str:
        """The parameter's flat name (`model.tree`)."""
        return ".".join(map(str, self.path))


def _same(x: np.ndarray) -> np.ndarray:
    return x


def transposed(x: np.ndarray) -> np.ndarray:
    """A view of `x` with its last two axes exchanged."""
    return np.swapaxes(x, -1, -2)


def tensors(config: ModelConfig) -> Iterator[Tensor]:
    """Every tensor of a folder with this architecture."""
    d = config.hidden_size
    yield Tensor("model.embed_tokens.weight", ("embedding",), None, (config.vocab_size, d), _same, _same)
    yield Tensor("model.input_hidden_states_scale", ("input_scale",), None, (d,), _same, _same)
    yield Tensor("model.input_hidden_states_bias", ("input_bias",), None, (d,), _same, _same)
    yield Tensor("model.norm.weight", ("norm", "weight"), None, (d,), _same, _same)
    if config.head_bias:
        yield Tensor("lm_head.bias", ("head_bias",), None, (config.vocab_size,), _same, _same)
    for index in range(config.num_layers):
        group, position = divmod(index, len(config.period))
        for name, path, shape, ours, theirs, part in _block(config, first=index == 0):
            yield Tensor(f"model.layers.{index}.{name}", ("blocks", position, *path), group, shape, ours, theirs, part)


_Row = tuple[str, tuple[str, ...], tuple[int, ...], Change, Change, slice | None]


def _block(config: ModelConfig, first: bool) -> Iterator[_Row]:
    d, e, f, r = config.hidden_size, config.num_experts, config.expert_size, config.router_size
    yield "input_layernorm.weight", ("attention_norm", "weight"), (d,), _same, _same, None
    yield "post_attention_layernorm.weight", ("mixture_norm", "weight"), (d,), _same, _same, None
    for theirs, ours in (("attention", "attention_merge"), ("mlp", "mixture_merge")):
        for name, attribute in (("hidden_states_scale", "hidden_scale"), ("hidden_states_bias", "hidden_bias"),
                                ("residual_scale", "residual_scale"), ("residual_bias", "residual_bias")):  # fmt: skip
            yield f"post_{theirs}_residual_scale.{name}", (ours, attribute), (d,), _same, _same, None
    yield from _attention(config)
    router = ("mixture", "router")
    yield "mlp.gate.down_proj.weight", (*router, "down"), (r, d), transposed, transposed, None
    yield "mlp.gate.down_proj.bias", (*router, "down_bias"), (r,), _same, _same, None
    if not first:  # the first layer has no state to scale; its γ stays at one
        yield "mlp.gate.router_states_scale", (*router, "state_scale"), (r,), _same, _same, None
    yield "mlp.gate.router_mlp.norm.weight", (*router, "norm", "weight"), (r,), _same, _same, None
    for name, attribute in (("fc1", "hidden1"), ("fc2", "hidden2")):
        yield f"mlp.gate.router_mlp.{name}.weight", (*router, attribute), (r, r), transposed, transposed, None
        yield f"mlp.gate.router_mlp.{name}.bias", (*router, f"{attribute}_bias"), (r,), _same, _same, None
    yield "mlp.gate.router_mlp.out_proj.weight", (*router, "output"), (e + 1, r), transposed, transposed, None
    yield "mlp.gate.balancing_biases", (*router, "balancing_bias"), (e + 1,), _same, _same, None
    experts = ("mixture", "experts")
    yield EXPERTS[0], (*experts, "gate_up"), (e, 2 * f, d), transposed, transposed, None
    yield EXPERTS[1], (*experts, "down"), (e, d, f), transposed, transposed, None


def _attention(config: ModelConfig) -> Iterator[_Row]:
    d, c, half = config.hidden_size, config.head_dim, config.kv_size // 2
    k0, k1, heads = config.depthwise_kernel, config.grouped_kernel, config.num_query_heads + config.num_kv_heads
    widths = (("q_proj", "query", config.query_size), ("k_proj", "key", config.kv_size),
              ("v_proj_current", "value_current", half), ("v_proj_delayed", "value_delayed", half))  # fmt: skip
    start = 0
    for name, attribute, width in widths:
        yield f"self_attn.qkv_proj.{name}.weight", ("attention", attribute), (width, d), transposed, transposed, None
        if config.attention_bias:
            part = slice(start, start + width)
            yield f"self_attn.qkv_proj.{name}.bias", ("attention", "projection_bias"), (width,), _same, _same, part
        start += width
    yield "self_attn.o_proj.weight", ("attention", "output"), (d, config.query_size), transposed, transposed, None
    if config.attention_bias:
        yield "self_attn.o_proj.bias", ("attention", "output_bias"), (d,), _same, _same, None
    yield (
        "self_attn.qkv_proj.conv_qk_depthwise.weight", ("attention", "depthwise"), (heads * c, 1, k0),
        lambda x: x.reshape(heads, c, k0).transpose(2, 0, 1),
        lambda x: x.transpose(1, 2, 0).reshape(heads * c, 1, k0), None,
    )  # fmt: skip
    yield (
        "self_attn.qkv_proj.conv_qk_grouped.weight", ("attention", "grouped"), (heads * c, c, k1),
        lambda x: x.reshape(heads, c, c, k1).transpose(3, 0, 2, 1),  # theirs is [head·out, in, tap]
        lambda x: x.transpose(1, 3, 2, 0).reshape(heads * c, c, k1), None,
    )  # fmt: skip
    for name in ("depthwise", "grouped"):
        yield (
            f"self_attn.qkv_proj.conv_qk_{name}.bias", ("attention", f"{name}_bias"), (heads * c,),
            lambda x: x.reshape(heads, c), lambda x: x.reshape(heads * c), None,
        )  # fmt: skip
    yield "self_attn.qk_norm.temp", ("attention", "temperature"), (config.num_kv_heads,), _same, _same, None
