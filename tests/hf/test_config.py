"""`config.json` there and back, and what is refused of it."""

import dataclasses
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import VARIANTS, tiny_config
from zaya_jax.config.checks import shown
from zaya_jax.errors import InputError
from zaya_jax.hf.config import from_hf, to_hf
from zaya_jax.hf.legacy_config import to_legacy


def tree(**changes):
    return {**json.loads(json.dumps(to_hf(tiny_config("sliding"), "float32"))), **changes}


def refused(changed):
    with pytest.raises(InputError) as caught:
        from_hf(changed, "a/config.json")
    return str(caught.value)


def resolved(config):
    """The pattern written out as the layers it makes, which is how the folder holds it."""
    window = config.sliding_window if "sliding" in config.period else None
    return dataclasses.replace(config, layer_pattern=config.period, sliding_window=window)


@pytest.mark.parametrize("variant", VARIANTS)
@given(rotary=st.sampled_from([0.0, 0.5, 1.0]), base=st.sampled_from([1e4, 5e6, 12345.5]), biases=st.booleans(),
       eps=st.sampled_from([1e-5, 1e-6]))  # fmt: skip
def test_a_configuration_survives_the_journey(variant, rotary, base, biases, eps):
    config = tiny_config(
        variant, rotary_fraction=rotary, rope_base=base, attention_bias=biases, head_bias=not biases, norm_eps=eps
    )
    there = json.loads(json.dumps(to_hf(config, "bfloat16")))
    assert resolved(from_hf(there, "x")) == resolved(config)
    assert there["dtype"] == "bfloat16"
    assert len(there["layer_types"]) == config.num_layers


@pytest.mark.parametrize(("key", "value"), [
    ("attention", "gqa"), ("attention", "gqa_qk_norm"), ("router", "linear"), ("residual_scaling", False),
    ("convolutions", False), ("query_key_mean", False), ("value_shift", False), ("router_layers", 1),
    ("depth_averaging", False),
])  # fmt: skip
def test_an_architecture_without_a_part_of_zaya1_is_refused(key, value):
    with pytest.raises(InputError, match=rf"model\.{key} is {shown(value)}.*transformers"):
        to_hf(tiny_config(**{key: value}), "float32")


@pytest.mark.parametrize("describe", [to_hf, to_legacy])
def test_a_kind_of_layer_that_a_folder_has_no_name_for_is_refused(describe):
    config = tiny_config(num_layers=2, layer_pattern=("full", "chunked"))
    with pytest.raises(InputError, match=r"model\.layer_pattern has 'chunked', .* full and sliding"):
        describe(config, "float32")


def test_layers_come_in_order():
    config = tiny_config("plain", layer_pattern=("sliding", "full", "full"), num_layers=6, sliding_window=3)
    assert to_hf(config, "float32")["layer_types"] == ["hybrid_sliding", "hybrid", "hybrid"] * 2
    assert from_hf(to_hf(config, "float32"), "x").layer_pattern == ("sliding", "full", "full") * 2


def test_what_is_left_out_has_transformers_defaults():
    bare = tree()
    for key in ("layer_types", "rope_parameters", "sliding_window", "attention_bias", "lm_head_bias", "rms_norm_eps",
                "initializer_range", "hidden_act", "tie_word_embeddings", "num_experts_per_tok"):  # fmt: skip
        del bare[key]
    config = from_hf(bare, "x")
    assert config.period == ("full",)
    assert (config.rope_base, config.rotary_fraction, config.attention_bias) == (5e6, 0.5, False)


@pytest.mark.parametrize(("changes", "sentence"), [
    ({"model_type": "llama"}, "model_type 'llama'"),
    ({"model_type": None}, "model_type null"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"tie_word_embeddings": False}, "tie_word_embeddings false"),
    ({"num_experts_per_tok": 2}, "num_experts_per_tok 2"),
    ({"hidden_size": None}, "hidden_size null"),
    ({"hidden_size": "24"}, "hidden_size '24'"),
    ({"hidden_size": 24.0}, "hidden_size 24.0"),
    ({"num_experts": True}, "num_experts true"),
    ({"layer_types": ["hybrid"]}, "1 layer_types, but num_hidden_layers is 4"),
    ({"layer_types": ["hybrid", "mamba"] * 2}, "layer type 'mamba'"),
    ({"rope_parameters": {"hybrid": {"rope_type": "yarn"}}}, "rope_type 'yarn'"),
    ({"rope_parameters": {"hybrid": {"partial_rotary_factor": 0.5}, "hybrid_sliding": {"partial_rotary_factor": 1.0}}},
     "different partial_rotary_factor values"),
])  # fmt: skip
def test_what_this_model_has_no_form_of_is_refused(changes, sentence):
    message = refused(tree(**changes))
    assert sentence in message
    assert message.startswith("a/config.json ")


@pytest.mark.parametrize("key", ["vocab_size", "moe_intermediate_size", "router_hidden_size", "cca_time0", "head_dim"])
def test_a_size_that_is_missing_is_named(key):
    bare = tree()
    del bare[key]
    assert key in refused(bare)


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_query_heads"),
    ({"num_hidden_layers": 0, "layer_types": []}, "num_hidden_layers"),
    ({"sliding_window": None}, "sliding_window"),
])  # fmt: skip
def test_sizes_that_do_not_fit_are_refused(changes, message):
    assert message in refused(tree(**changes))


@pytest.mark.parametrize("changes", [
    {"layer_types": 4},
    {"layer_types": [["hybrid"]] * 4},
    {"rope_parameters": [1]},
    {"rope_parameters": {"hybrid": 3}},
    {"rope_parameters": {"hybrid": {"rope_theta": "large"}}},
    {"rope_parameters": {"hybrid": {"rope_theta": None}}},
    {"sliding_window": "four"},
    {"rms_norm_eps": None},
    {"rms_norm_eps": "small"},
    {"attention_bias": "false"},
], ids=lambda changes: re.sub(r"\W+", "_", str(changes)))  # fmt: skip
def test_a_value_of_the_wrong_type_is_refused_and_named(changes):
    message = refused(tree(**changes))
    assert "a/config.json" in message
    assert next(iter(changes)) in message or "layer type" in message or "rope_theta" in message


def test_a_kind_of_rope_beside_the_sections_is_taken():
    """The released ZAYA1-8B has one; it says what the sections say."""
    ropes = tree()["rope_parameters"]
    assert from_hf(tree(rope_parameters={**ropes, "rope_type": "default"}), "x") == from_hf(tree(), "x")


def test_a_rope_for_all_layers_is_not_passed_over_in_silence():
    """One flat section, as most models of `transformers` write it: taken or refused, but not ignored."""
    flat = {"rope_type": "yarn", "rope_theta": 777.0, "factor": 4.0}
    assert "yarn" in refused(tree(rope_parameters=flat))
