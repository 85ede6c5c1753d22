"""Legacy configurations: both released dialects, the journey there and back, and what is refused."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import VARIANTS, tiny_config
from tests.hf.test_config import resolved
from tests.hf.test_legacy import RELEASED_8B
from zaya_jax.errors import InputError
from zaya_jax.hf.legacy_config import from_legacy, to_legacy

# As released (docs/reference.md §12.3), but for what is the same in every model.
LEGACY_8B = {
    "activation_func": "swiglu", "activation_func_fp8_input_store": False, "add_bias_linear": False,
    "apply_rope_fusion": True, "architectures": ["ZayaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "bias_activation_fusion": True, "bos_token_id": 2, "cca": True, "dtype": "bfloat16", "eos_token_id": 106,
    "ffn_hidden_size": 4096, "fused_add_norm": False, "gated_linear_unit": True, "head_dim": 128, "hidden_size": 2048,
    "kv_channels": 128, "lm_head_bias": False, "mamba_cache_dtype": "float32", "max_position_embeddings": 131072,
    "model_type": "zaya", "moe_router_topk": 1, "norm_epsilon": 1e-05, "normalization": "RMSNorm",
    "num_attention_heads": 8, "num_experts": 16, "num_hidden_layers": 80, "num_key_value_heads": 2,
    "num_query_groups": 2, "pad_token_id": 0, "partial_rotary_factor": 0.5, "residual_in_fp32": True,
    "rope_scaling": False, "rope_theta": 5000000, "scale_residual_merge": True, "sliding_window": None,
    "use_cache": True, "vocab_size": 262272, "zaya_mlp_expansion": 256, "zaya_use_eda": True, "zaya_use_mod": True,
}  # fmt: skip
# ZAYA1-base: a list a key, heads counted before compression, a stale number of layers.
BASE = {
    "model_type": "zaya", "zaya_layers": ["a", 16] * 40, "cca_num_q_heads": [8, 0] * 40,
    "num_query_groups_list": [2, 0] * 40, "ffn_hidden_size_list": [0, 4096] * 40, "zaya_mlp_expansion": [0, 256] * 40,
    "num_attention_heads": 16, "num_key_value_heads": 2, "num_hidden_layers": 120, "rope_scaling": False,
    "residual_in_fp32": False, "eos_token_id": 1, "hidden_size": 2048, "vocab_size": 262272, "rope_theta": 1e6,
    "max_position_embeddings": 32768, "norm_epsilon": 1e-5, "moe_router_topk": 1, "clamp_temp": False,
    "swa_layers": [0] * 80,
}  # fmt: skip
SLIDING_74B = {
    **LEGACY_8B, "num_hidden_layers": 120, "hidden_size": 4096, "num_attention_heads": 16, "num_experts": 24,
    "ffn_hidden_size": 8192, "swa_layers": [0, 0, 4096, 0] * 30, "swa_rotary_base": 10_000,
}  # fmt: skip


def refused(tree):
    with pytest.raises(InputError) as caught:
        from_legacy(tree, "a/config.json")
    assert str(caught.value).startswith("a/config.json ")
    return str(caught.value)


def test_the_released_8b():
    assert from_legacy(LEGACY_8B, "x") == dataclasses.replace(RELEASED_8B, layer_pattern=("full",) * 40)


def test_the_base_model_with_a_list_a_key():
    config = from_legacy(BASE, "x")
    assert config == dataclasses.replace(RELEASED_8B, layer_pattern=("full",) * 40, rope_base=1e6, max_positions=32_768)
    padded = {**BASE, "ffn_hidden_size_list": [0, 4096] * 60, "swa_layers": [0] * 160}
    assert from_legacy(padded, "x") == config


def test_the_74b_slides_in_every_other_layer():
    config = from_legacy(SLIDING_74B, "x")
    assert config.period == ("full", "sliding")
    assert (config.num_layers, config.sliding_window, config.sliding_rope_base) == (60, 4097, 1e4)
    assert (config.num_query_heads, config.num_experts, config.expert_size) == (16, 24, 4096)
    halves = {**SLIDING_74B, "swa_layers": [0, 4096] * 30}
    assert from_legacy(halves, "x") == config
    told = {**SLIDING_74B, "layer_types": ["full_attention"] * 2 * 60, "swa_layers": None}
    assert from_legacy(told, "x").period == ("full",)
    types = ["full_attention", "full_attention", "sliding_attention", "full_attention"] * 30
    assert from_legacy({**SLIDING_74B, "layer_types": types}, "x") == config
    given_window = {**SLIDING_74B, "sliding_window": 4097, "layer_types": types, "swa_layers": None}
    assert from_legacy(given_window, "x") == config


@pytest.mark.parametrize("variant", VARIANTS)
@given(rotary=st.sampled_from([0.0, 0.5, 1.0]), base=st.sampled_from([1e4, 5e6, 12345.5]), biases=st.booleans(),
       eps=st.sampled_from([1e-5, 1e-6]), window=st.integers(2, 9))  # fmt: skip
def test_a_configuration_survives_the_journey(variant, rotary, base, biases, eps, window):
    config = tiny_config(variant, rotary_fraction=rotary, rope_base=base, attention_bias=biases, head_bias=not biases,
                         norm_eps=eps, sliding_window=window)  # fmt: skip
    there = json.loads(json.dumps(to_legacy(config, "bfloat16")))
    assert resolved(from_legacy(there, "x")) == resolved(config)
    assert there["num_hidden_layers"] == 2 * config.num_layers


@pytest.mark.parametrize(("tree", "changes", "message"), [
    (LEGACY_8B, {"model_type": "llama"}, "model_type 'llama'"),
    (LEGACY_8B, {"clamp_temp": True}, "clamp_temp true"),
    (LEGACY_8B, {"zaya_use_mod": False}, "zaya_use_mod false"),
    (LEGACY_8B, {"zaya_use_eda": False}, "zaya_use_eda false"),
    (LEGACY_8B, {"scale_residual_merge": False}, "scale_residual_merge false"),
    (LEGACY_8B, {"activation_func": "gelu"}, "activation_func 'gelu'"),
    (LEGACY_8B, {"moe_router_topk": 2}, "moe_router_topk 2"),
    (LEGACY_8B, {"tie_word_embeddings": False}, "tie_word_embeddings false"),
    (LEGACY_8B, {"rope_scaling": {"factor": 2}}, "rope_scaling"),
    (LEGACY_8B, {"zaya_new_trick": 1}, "the unknown key zaya_new_trick"),
    (LEGACY_8B, {"moe_shared_experts": 1}, "the unknown key moe_shared_experts"),
    (LEGACY_8B, {"quantization_config": {"fmt": "fp8"}}, "quantization_config"),
    (LEGACY_8B, {"vision_config": {"depth": 2}}, "vision_config"),
    (LEGACY_8B, {"num_hidden_layers": 81}, "num_hidden_layers 81"),
    (LEGACY_8B, {"num_hidden_layers": None}, "num_hidden_layers null"),
    (LEGACY_8B, {"ffn_hidden_size": 4095}, "ffn_hidden_size 4095"),
    (LEGACY_8B, {"zaya_mlp_expansion": None}, "zaya_mlp_expansion null"),
    (LEGACY_8B, {"swa_layers": [0] * 7}, "swa_layers"),
    (LEGACY_8B, {"swa_layers": [-1] * 80}, "swa_layers"),
    (LEGACY_8B, {"swa_layers": [4, 0, 8, 0] * 20}, "different widths ([4, 8])"),
    (LEGACY_8B, {"layer_types": ["mamba"] * 80}, "layer_types"),
    (LEGACY_8B, {"sliding_window": 2.5}, "sliding_window 2.5"),
    (LEGACY_8B, {"num_attention_heads": 9}, "num_query_heads"),
    (BASE, {"zaya_layers": ["a", 16, 16]}, "zaya_layers"),
    (BASE, {"zaya_layers": [16, "a"] * 40}, "zaya_layers"),
    (BASE, {"zaya_layers": ["a", 16] * 39 + ["a", 8]}, "different zaya_layers"),
    (BASE, {"zaya_layers": []}, "zaya_layers"),
    (BASE, {"cca_num_q_heads": [8, 0] * 39 + [4, 0]}, "different cca_num_q_heads"),
    (BASE, {"ffn_hidden_size_list": [0, 4096] * 39}, "78 entries in ffn_hidden_size_list"),
    (BASE, {"num_query_groups_list": [0, 2] * 40}, "num_query_groups_list 0"),
])  # fmt: skip
def test_what_this_model_has_no_form_of_is_refused(tree, changes, message):
    assert message in refused({**tree, **changes})


def test_what_the_layout_has_no_form_of_is_not_written():
    with pytest.raises(InputError, match=r"model\.sliding_window is 1"):
        to_legacy(tiny_config("sliding", sliding_window=1), "float32")
    with pytest.raises(InputError, match=r"model\.attention is 'gqa'"):
        to_legacy(tiny_config(attention="gqa"), "float32")
