"""The legacy layout's names, against a list written by hand (docs/reference.md §12.2), and their count in the 8B."""

import numpy as np
import pytest

from tests.helpers import VARIANTS, tiny_config
from zaya_jax.config import ModelConfig
from zaya_jax.hf.tensors import is_legacy, legacy_tensors, tensors

# d 24, 4 query and 2 key heads of 8 channels, 2 experts of width 12, router 8, vocabulary 37; two layers, four there.
GOLDEN = """
model.embed_tokens.weight 37 24
model.final_norm.weight 24
model.res_scale.hidden_states_scale 24
model.res_scale.hidden_states_bias 24
model.res_scale.residual_scale 24
model.res_scale.residual_bias 24
model.layers.0.res_scale.hidden_states_scale 24
model.layers.0.res_scale.hidden_states_bias 24
model.layers.0.input_norm.weight 24
model.layers.0.self_attn.qkv.linear_q.weight 32 24
model.layers.0.self_attn.qkv.linear_k.weight 16 24
model.layers.0.self_attn.qkv.val_proj1.weight 8 24
model.layers.0.self_attn.qkv.val_proj2.weight 8 24
model.layers.0.self_attn.qkv.conv_qk.0.weight 48 1 2
model.layers.0.self_attn.qkv.conv_qk.0.bias 48
model.layers.0.self_attn.qkv.conv_qk.1.weight 48 8 2
model.layers.0.self_attn.qkv.conv_qk.1.bias 48
model.layers.0.self_attn.qkv.temp 2
model.layers.0.self_attn.o_proj.weight 24 32
model.layers.1.res_scale.hidden_states_scale 24
model.layers.1.res_scale.hidden_states_bias 24
model.layers.1.res_scale.residual_scale 24
model.layers.1.res_scale.residual_bias 24
model.layers.1.input_norm.weight 24
model.layers.1.zaya_block.router.down_proj.weight 8 24
model.layers.1.zaya_block.router.down_proj.bias 8
model.layers.1.zaya_block.router.rmsnorm_eda.weight 8
model.layers.1.zaya_block.router.router_mlp.0.weight 8 8
model.layers.1.zaya_block.router.router_mlp.0.bias 8
model.layers.1.zaya_block.router.router_mlp.2.weight 8 8
model.layers.1.zaya_block.router.router_mlp.2.bias 8
model.layers.1.zaya_block.router.router_mlp.4.weight 3 8
model.layers.1.zaya_block.router.balancing_biases 3
model.layers.1.zaya_block.experts.local_experts.0.linear_fc1.weight 24 24
model.layers.1.zaya_block.experts.local_experts.0.linear_fc2.weight 24 12
model.layers.1.zaya_block.experts.local_experts.1.linear_fc1.weight 24 24
model.layers.1.zaya_block.experts.local_experts.1.linear_fc2.weight 24 12
model.layers.2.res_scale.hidden_states_scale 24
model.layers.2.res_scale.hidden_states_bias 24
model.layers.2.res_scale.residual_scale 24
model.layers.2.res_scale.residual_bias 24
model.layers.2.input_norm.weight 24
model.layers.2.self_attn.qkv.linear_q.weight 32 24
model.layers.2.self_attn.qkv.linear_k.weight 16 24
model.layers.2.self_attn.qkv.val_proj1.weight 8 24
model.layers.2.self_attn.qkv.val_proj2.weight 8 24
model.layers.2.self_attn.qkv.conv_qk.0.weight 48 1 2
model.layers.2.self_attn.qkv.conv_qk.0.bias 48
model.layers.2.self_attn.qkv.conv_qk.1.weight 48 8 2
model.layers.2.self_attn.qkv.conv_qk.1.bias 48
model.layers.2.self_attn.qkv.temp 2
model.layers.2.self_attn.o_proj.weight 24 32
model.layers.3.res_scale.hidden_states_scale 24
model.layers.3.res_scale.hidden_states_bias 24
model.layers.3.res_scale.residual_scale 24
model.layers.3.res_scale.residual_bias 24
model.layers.3.input_norm.weight 24
model.layers.3.zaya_block.router.down_proj.weight 8 24
model.layers.3.zaya_block.router.down_proj.bias 8
model.layers.3.zaya_block.router.router_states_scale 8
model.layers.3.zaya_block.router.rmsnorm_eda.weight 8
model.layers.3.zaya_block.router.router_mlp.0.weight 8 8
model.layers.3.zaya_block.router.router_mlp.0.bias 8
model.layers.3.zaya_block.router.router_mlp.2.weight 8 8
model.layers.3.zaya_block.router.router_mlp.2.bias 8
model.layers.3.zaya_block.router.router_mlp.4.weight 3 8
model.layers.3.zaya_block.router.balancing_biases 3
model.layers.3.zaya_block.experts.local_experts.0.linear_fc1.weight 24 24
model.layers.3.zaya_block.experts.local_experts.0.linear_fc2.weight 24 12
model.layers.3.zaya_block.experts.local_experts.1.linear_fc1.weight 24 24
model.layers.3.zaya_block.experts.local_experts.1.linear_fc2.weight 24 12
"""
RELEASED_8B = ModelConfig(
    vocab_size=262_272, hidden_size=2048, num_layers=40, num_query_heads=8, num_kv_heads=2, head_dim=128,
    num_experts=16, expert_size=2048, router_size=256, max_positions=131_072,
)  # fmt: skip


def test_names_and_shapes_are_those_written_by_hand():
    golden = {name: tuple(map(int, shape)) for name, *shape in map(str.split, GOLDEN.strip().splitlines())}
    assert {tensor.name: tensor.shape for tensor in legacy_tensors(tiny_config(num_experts=2))} == golden


def test_the_released_8b_has_2483_tensors():
    rows = list(legacy_tensors(RELEASED_8B))
    assert len({row.name for row in rows}) == len(rows) == 2483
    # Besides the balancing biases, of 17 classes a layer, which are no parameters (docs/reference.md §1.1).
    assert sum(int(np.prod(row.shape)) for row in rows) == 8_840_488_784 + 40 * 17


@pytest.mark.parametrize(("layer", "name", "legacy"), [
    (0, "post_mlp_residual_scale.residual_bias", "model.layers.2.res_scale.residual_bias"),
    (1, "post_mlp_residual_scale.residual_bias", "model.res_scale.residual_bias"),
    (1, "post_attention_residual_scale.residual_bias", "model.layers.3.res_scale.residual_bias"),
    (1, "input_layernorm.weight", "model.layers.2.input_norm.weight"),
    (1, "post_attention_layernorm.weight", "model.layers.3.input_norm.weight"),
])  # fmt: skip
def test_merges_and_norms_stand_with_the_sublayer_that_begins_with_them(layer, name, legacy):
    config = tiny_config()
    ours = {(tensor.leaf, tensor.group) for tensor in tensors(config) if tensor.name == f"model.layers.{layer}.{name}"}
    theirs = {(tensor.leaf, tensor.group) for tensor in legacy_tensors(config) if tensor.name == legacy}
    assert ours == theirs
    assert len(ours) == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_both_layouts_hold_the_same_values(variant):
    """Each value of the model once, and an expert's where the tensor of all experts has it."""
    config = tiny_config(variant, attention_bias=True, head_bias=True)
    rng, stacks, left = np.random.default_rng(0), {}, {}
    for tensor in tensors(config):
        ours = tensor.to_ours(rng.normal(size=tensor.shape))
        stacks[tensor.leaf, tensor.group] = ours  # of a bias in parts the last, which is not looked at
        left[tensor.leaf, tensor.group] = left.get((tensor.leaf, tensor.group), 0) + ours.size
    for tensor in legacy_tensors(config):
        left[tensor.leaf, tensor.group] -= int(np.prod(tensor.shape))
        if "local_experts" in tensor.name:
            ours = stacks[tensor.leaf, tensor.group][tensor.part]
            assert tensor.to_theirs(ours).shape == tensor.shape
            np.testing.assert_array_equal(tensor.to_ours(tensor.to_theirs(ours)), ours)
    assert set(left.values()) == {0}


def test_the_layout_is_told_by_names():
    config = tiny_config()
    assert is_legacy([tensor.name for tensor in legacy_tensors(config)])
    assert not is_legacy([tensor.name for tensor in tensors(config)])
    assert not is_legacy([])
