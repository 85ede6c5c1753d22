import dataclasses
import functools
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from jax.extend.core import ClosedJaxpr, Jaxpr

from tests.helpers import tiny_config
from zaya_jax.config import ModelConfig, load_config
from zaya_jax.model import arithmetic
from zaya_jax.model.attention import Context, visible_keys
from zaya_jax.model.layers import rotary_table
from zaya_jax.model.zaya import Block
from zaya_jax.ops import Ops

CONFIGS = Path(__file__).parents[2] / "configs"

PARTS = [dict(zip(("attention", "router", "residual_scaling"), parts, strict=True))
         for parts in (("cca", "zaya", True), ("cca", "linear", False), ("gqa", "zaya", False),
                       ("gqa", "linear", True))]  # fmt: skip
every_combination = pytest.mark.parametrize("parts", PARTS, ids=lambda parts: "-".join(map(str, parts.values())))

# Shrinking what fails would trace hundreds of models, and a failure already names its configuration.
few = settings(max_examples=2, phases=(Phase.explicit, Phase.generate))


@st.composite
def configs(draw, parts):
    kv = draw(st.sampled_from([1, 2, 3]))
    config = ModelConfig(
        vocab_size=draw(st.integers(1, 50)), hidden_size=draw(st.integers(1, 40)),
        num_layers=draw(st.sampled_from([2, 4])),
        num_query_heads=kv * draw(st.sampled_from([1, 2, 5])), num_kv_heads=kv, head_dim=2 * draw(st.integers(1, 6)),
        num_experts=draw(st.integers(1, 6)), expert_size=draw(st.integers(1, 20)), router_size=draw(st.integers(1, 9)),
        max_positions=64, rotary_fraction=0.0,
        layer_pattern=draw(st.sampled_from([("full",), ("full", "sliding")])), sliding_window=3,
        depthwise_kernel=draw(st.integers(1, 4)), grouped_kernel=draw(st.integers(1, 4)),
        attention_bias=draw(st.booleans()), head_bias=draw(st.booleans()), **parts,
    )  # fmt: skip
    config.check()
    return config


def products(jaxpr):
    """Operations of the matrix products in a program."""
    count = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            left, right = (operand.aval.shape for operand in equation.invars)
            (summed, _), (batched, _) = equation.params["dimension_numbers"]
            free = math.prod(right) // math.prod(left[axis] for axis in (*summed, *batched))
            count += 2 * math.prod(left) * free
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr)):
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                count += products(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)
    return count


@every_combination
@few
@given(data=st.data())
def test_operations_are_those_of_the_products_of_a_real_layer(parts, data):
    config = dataclasses.replace(data.draw(configs(parts)), layer_pattern=("full",))
    b, s = 2, 7
    # Neither reference counts as it is costed: blocks are padded, and every expert's rows too.
    spies = Ops(attention=lambda q, *_, **__: q, experts=lambda h, *_: h)
    block = jax.eval_shape(functools.partial(Block, config, config.layer_kinds[0]), jax.random.key(0))
    table = rotary_table(jnp.zeros((b, s)), config.rotary_size, 1e4)
    context = Context(*[jnp.ones((b, s), jnp.int32)] * 2, {config.rope_base: table})
    x = jax.ShapeDtypeStruct((b, s, config.hidden_size), jnp.float32)
    state = jax.ShapeDtypeStruct((b, s, config.router_size), jnp.float32)
    program = jax.make_jaxpr(lambda block, x, state: block(x, state, context, None, spies, None, None))(block, x, state)
    token = products(program.jaxpr) / (b * s)
    token += 4 * config.query_size * visible_keys(s, None) + 6 * config.hidden_size * config.expert_size
    if config.attention == "cca":  # its taps are sums, not a product; the mean of queries and keys is not counted
        heads = config.num_query_heads + config.num_kv_heads
        token += 2 * heads * config.head_dim * config.depthwise_kernel - 2 * heads**2 * config.head_dim
    head = 2 * config.vocab_size * config.hidden_size
    assert arithmetic.prefill_flops_per_token(config, s) == pytest.approx(config.num_layers * token + head)


@every_combination
def test_a_cached_token_is_keys_and_values_of_every_layer(parts):
    config = tiny_config("sliding", **parts)
    assert arithmetic.cache_bytes_per_token(config) == config.num_layers * 2 * config.kv_size * 2


@pytest.mark.parametrize(("name", "published", "within"), [("74b", 74.8e9, 0.01), ("1b8", 1.8e9, 0.03)])
def test_other_sizes_have_the_totals_they_are_named_after(name, published, within):
    path = CONFIGS / f"zaya1_{name}.yaml"
    config = load_config(path).model
    total, active = arithmetic.total_parameters(config), arithmetic.active_parameters(config)
    assert total == pytest.approx(published, rel=within)
    message = path.read_text(encoding="utf-8")
    training = arithmetic.training_flops_per_token(config, 4096)
    for figure in (f"{total:,} parameters", f"{active:,} outside", f"{training / 1e9:.2f} GFLOP"):
        assert figure in message, figure


def test_the_74b_is_published_as_activating_about_four_billion():
    """docs/reference.md §12.3."""
    config = load_config(CONFIGS / "zaya1_74b.yaml").model
    assert arithmetic.active_parameters(config) == pytest.approx(4e9, rel=0.1)
    assert (config.layer_pattern, config.num_groups) == (("full", "sliding"), 30)


@pytest.fixture(scope="module")
def released():
    return load_config(CONFIGS / "zaya1_8b.yaml").model


def test_the_released_model(released):
    """The figures of docs/reference.md §1.1."""
    assert arithmetic.total_parameters(released) == 8_840_488_784
    assert arithmetic.active_parameters(released) == pytest.approx(753.6e6, rel=1e-4)
    assert arithmetic.cache_bytes_per_token(released) == 40_960


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
    assert visible_keys(context, window) == pytest.approx(seen.sum(1).mean())


def test_sliding_layers_see_less():
    config = tiny_config("sliding")
    full = dataclasses.replace(config, layer_pattern=("full",))
    less = arithmetic.prefill_flops_per_token(full, 32) - arithmetic.prefill_flops_per_token(config, 32)
    keys = visible_keys(32, None) - visible_keys(32, config.sliding_window)
    assert less == pytest.approx(2 * 4 * config.query_size * keys)  # two of the four layers slide


def test_a_frozen_head_has_no_gradient_of_its_own():
    config = load_config(CONFIGS / "zaya1_8b.yaml").model
    spared = arithmetic.training_flops_per_token(config, 64) - arithmetic.training_flops_per_token(config, 64, True)
    assert spared == 2 * config.vocab_size * config.hidden_size
