"""Map every tensor of a `transformers` ZAYA folder, in either layout, to a parameter (docs/reference.md §12.1, §12.2).

Legacy layer 2i is the attention of layer i here, legacy layer 2i + 1 its mixture of experts. A legacy sublayer starts
with the residual scaling that ends the previous sublayer here: the first one holds the model's input scale and bias,
and the last one belongs to the model. Each expert is a separate tensor.
"""

from collections.abc import Collection, Iterator

from zaya_jax.config import ModelConfig
from zaya_jax.model.experts import HF_EXPERTS
from zaya_jax.model.hf_names import HfTensor, transposed, within
from zaya_jax.model.router import is_inert
from zaya_jax.model.zaya import Block, Zaya


def tensors(config: ModelConfig) -> Iterator[HfTensor]:
    """List every tensor of a folder with this architecture."""
    yield from Zaya.hf_tensors(config)
    for index in range(config.num_layers):
        group, position = divmod(index, len(config.period))
        for tensor in within(f"blocks.{position}", Block.hf_tensors(config, config.layer_kinds[position])):
            if not is_inert(tensor.leaf, group):
                yield tensor._replace(name=f"model.layers.{index}.{tensor.name}", group=group)


_MODEL = {
    "model.input_hidden_states_scale": "model.layers.0.res_scale.hidden_states_scale",
    "model.input_hidden_states_bias": "model.layers.0.res_scale.hidden_states_bias",
    "model.norm.weight": "model.final_norm.weight",
}
# Name prefixes within a layer: current layout → legacy sublayer.
_ATTENTION = {
    "input_layernorm.": "input_norm.",
    "self_attn.qkv_proj.q_proj.": "self_attn.qkv.linear_q.",
    "self_attn.qkv_proj.k_proj.": "self_attn.qkv.linear_k.",
    "self_attn.qkv_proj.v_proj_current.": "self_attn.qkv.val_proj1.",
    "self_attn.qkv_proj.v_proj_delayed.": "self_attn.qkv.val_proj2.",
    "self_attn.qkv_proj.conv_qk_depthwise.": "self_attn.qkv.conv_qk.0.",
    "self_attn.qkv_proj.conv_qk_grouped.": "self_attn.qkv.conv_qk.1.",
    "self_attn.qk_norm.temp": "self_attn.qkv.temp",
    "self_attn.o_proj.": "self_attn.o_proj.",
}
_MIXTURE = {
    "post_attention_residual_scale.": "res_scale.",
    "post_attention_layernorm.": "input_norm.",
    "mlp.gate.router_mlp.norm.": "zaya_block.router.rmsnorm_eda.",
    "mlp.gate.router_mlp.fc1.": "zaya_block.router.router_mlp.0.",
    "mlp.gate.router_mlp.fc2.": "zaya_block.router.router_mlp.2.",
    "mlp.gate.router_mlp.out_proj.": "zaya_block.router.router_mlp.4.",
    "mlp.gate.": "zaya_block.router.",  # down_proj, router_states_scale, balancing_biases
}
_MERGE = "post_mlp_residual_scale."
_EXPERT = {"mlp.experts.gate_up_proj": "linear_fc1", "mlp.experts.down_proj": "linear_fc2"}


def is_legacy(names: Collection[str]) -> bool:
    """Return whether these tensor names are of the legacy layout."""
    return any(".zaya_block." in name for name in names)


def legacy_tensors(config: ModelConfig) -> Iterator[HfTensor]:
    """List every tensor of a legacy folder with this architecture."""
    for tensor in tensors(config):
        head, _, rest = tensor.name.removeprefix("model.layers.").partition(".")
        if not tensor.name.startswith("model.layers."):
            yield tensor._replace(name=_MODEL.get(tensor.name, tensor.name))
        elif rest in HF_EXPERTS:
            layer = f"model.layers.{2 * int(head) + 1}.zaya_block.experts.local_experts"
            for expert in range(config.num_experts):
                name, part = f"{layer}.{expert}.{_EXPERT[rest]}.weight", slice(expert, expert + 1)
                changes = {"to_ours": lambda x: transposed(x)[None], "to_theirs": lambda x: transposed(x[0])}
                yield tensor._replace(name=name, shape=tensor.shape[1:], part=part, **changes)
        else:
            yield tensor._replace(name=_name(int(head), rest, config.num_layers))


def _name(layer: int, rest: str, num_layers: int) -> str:
    if rest.startswith(_MERGE):
        home = "model" if layer == num_layers - 1 else f"model.layers.{2 * layer + 2}"
        return f"{home}.res_scale.{rest.removeprefix(_MERGE)}"
    for index, table in ((2 * layer, _ATTENTION), (2 * layer + 1, _MIXTURE)):
        for ours, theirs in table.items():
            if rest.startswith(ours):
                return f"model.layers.{index}.{theirs}{rest.removeprefix(ours)}"
    raise ValueError(f"The tensor {rest} of a layer has no legacy name.")
