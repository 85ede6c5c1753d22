import dataclasses
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import abstract_model, tiny_config
from zaya_jax.config import ModelConfig, load_config
from zaya_jax.model import arithmetic
from zaya_jax.model.tree import parameters

CONFIGS = Path(__file__).parents[2] / "configs"


def real_sizes(config):
    return {name: x.size for name, x in jax.eval_shape(parameters, abstract_model(config)).items()}


@st.composite
def configs(draw):
    kv = draw(st.sampled_from([1, 2, 3]))
    config = ModelConfig(
        vocab_size=draw(st.integers(1, 50)), hidden_size=draw(st.integers(1, 40)),
        num_layers=draw(st.sampled_from([2, 4])),
        num_query_heads=kv * draw(st.sampled_from([1, 2, 5])), num_kv_heads=kv, head_dim=2 * draw(st.integers(1, 6)),
        num_experts=draw(st.integers(1, 6)), expert_size=draw(st.integers(1, 20)), router_size=draw(st.integers(1, 9)),
        max_positions=64, rotary_fraction=0.0,
        layer_pattern=draw(st.sampled_from([("full",), ("full", "sliding")])), sliding_window=3,
        depthwise_kernel=draw(st.integers(1, 4)), grouped_kernel=draw(st.integers(1, 4)),
        attention_bias=draw(st.booleans()), head_bias=draw(st.booleans()),
    )  # fmt: skip
    config.check()
    return config


@settings(max_examples=8)
@given(config=configs())
def test_counts_are_the_sizes_of_the_real_leaves(config):
    sizes = real_sizes(config)
    total = sum(sizes.values()) - config.router_size  # the first layer's inert γ
    assert arithmetic.total_parameters(config) == total
    assert arithmetic.non_embedding_parameters(config) == total - sizes["embedding"]
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    idle = experts * (config.num_experts - 1) // config.num_experts
    assert arithmetic.active_parameters(config) == total - sizes["embedding"] - idle


@pytest.fixture(scope="module")
def released():
    return load_config(CONFIGS / "zaya1_8b.yaml").model


def test_the_released_model(released):
    """The figures of zaya1.md §1.1."""
    assert arithmetic.total_parameters(released) == 8_840_488_784
    assert arithmetic.non_embedding_parameters(released) == 8_303_355_728
    assert arithmetic.active_parameters(released) == pytest.approx(753.6e6, rel=1e-4)
    assert arithmetic.cache_bytes_per_token(released) == 40_960
    assert arithmetic.cache_state_bytes(released) == 4 * 40 * (1280 * 2 + 128)


@pytest.mark.parametrize(("context", "attention", "training"), [(4096, 0.336e9, 8.74e9), (32768, 2.68e9, 15.8e9),
                                                               (131072, 10.7e9, 40.0e9)])  # fmt: skip
def test_the_released_models_operations(released, context, attention, training):
    head = 1.074e9
    forward = arithmetic.prefill_flops_per_token(released, context)
    assert forward == pytest.approx(1.505e9 + head + attention, rel=0.01)
    assert forward - arithmetic.prefill_flops_per_token(released, context, head=False) == pytest.approx(head, rel=0.001)
    assert arithmetic.training_flops_per_token(released, context) == pytest.approx(training, rel=0.01)


@given(context=st.integers(1, 40), window=st.one_of(st.none(), st.integers(1, 50)))
def test_visible_keys_are_counted_one_by_one(context, window):
    query, key = np.arange(context)[:, None], np.arange(context)
    seen = (key <= query) & (query - key < (window or context))
    assert arithmetic.visible_keys(context, window) == pytest.approx(seen.sum(1).mean())


def test_sliding_layers_see_less():
    config = tiny_config("sliding")
    full = dataclasses.replace(config, layer_pattern=("full",))
    less = arithmetic.prefill_flops_per_token(full, 32) - arithmetic.prefill_flops_per_token(config, 32)
    keys = arithmetic.visible_keys(32, None) - arithmetic.visible_keys(32, config.sliding_window)
    assert less == pytest.approx(2 * 4 * config.query_size * keys)  # two of the four layers slide
