"""Captured values are the model's own, in the order of its layers, whatever modules it has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assert_close, jit, random_model, tiny_config
from zaya_jax import capture, capture_shapes
from zaya_jax.errors import InputError
from zaya_jax.model.tree import balancing_biases
from zaya_jax.ops.router import choose_class

CONFIG = tiny_config("gqa")  # two positions in the period, two groups
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, CONFIG.vocab_size, (2, 7)), jnp.int32)
SEGMENTS = jnp.asarray([[1, 1, 1, 2, 2, 0, 0], [3] * 7], jnp.int32)


@pytest.fixture(scope="module")
def model():
    return random_model(CONFIG)


@pytest.fixture(scope="module")
def captured(model):
    """All values of a compiled run."""
    return jax.device_get(jit(lambda model: capture(model, TOKENS, "*", SEGMENTS))(model))


def test_layers_follow_one_another(model, captured):
    """The residual stream that leaves a layer enters the next; so does the router's state."""
    for after, before in (("layers", "layers.args.x_bsd"), ("layers.state_bsr", "layers.args.state_bsr")):
        assert len(captured[after]) == CONFIG.num_layers
        np.testing.assert_array_equal(captured[after][:-1], captured[before][1:])
    np.testing.assert_array_equal(captured["layers"][-1], captured["norm.args.x"])
    assert not captured["layers.args.state_bsr"][0].any()
    embedding, bias, scale = (np.asarray(x[...]) for x in (model.embedding, model.input_bias, model.input_scale))
    assert_close(captured["layers.args.x_bsd"][0], (embedding[TOKENS] + bias) * scale, 1e-6)
    norm = jax.tree.map(lambda x: x[0], model.blocks[0].attention_norm)
    normed = norm(captured["layers.args.x_bsd"][0], jnp.float32)
    assert_close(captured["layers.attention.args.h_bsd"][0], normed, 1e-6)
    assert len({captured["layers.attention"][index].tobytes() for index in range(CONFIG.num_layers)}) == 4


def test_the_routers_choice_is_that_of_its_probabilities(model, captured):
    probability = captured["layers.mixture.router.probabilities"]
    np.testing.assert_allclose(probability.sum(-1), 1, rtol=1e-5)
    biases = np.stack([np.asarray(x) for x in balancing_biases(model).values()], 1).reshape(CONFIG.num_layers, -1)
    for layer in range(CONFIG.num_layers):
        expert, weight = choose_class(probability[layer], biases[layer], SEGMENTS != 0)
        chosen = captured["layers.mixture.router.expert_bs"][layer]
        np.testing.assert_array_equal(chosen, expert)
        assert_close(captured["layers.mixture.router.weight_bs"][layer], weight, 1e-6)
        counts = np.bincount(chosen[SEGMENTS != 0], minlength=CONFIG.num_experts + 1)
        np.testing.assert_array_equal(counts, captured["layers.counts_e"][layer])


def test_names_and_patterns_choose(model, captured):
    names = ("layers.attention.attend.args.[qk]_*", "norm")
    chosen = jax.eval_shape(lambda model: capture(model, TOKENS, names, SEGMENTS), model)
    assert sorted(chosen) == ["layers.attention.attend.args.k_bskc", "layers.attention.attend.args.q_bshc", "norm"]
    assert {name: x.shape for name, x in chosen.items()} == {name: captured[name].shape for name in chosen}


@pytest.mark.parametrize("variant", ["gqa", "bare", "reduced"])
def test_shapes_are_listed_for_every_model(variant, captured):
    config = tiny_config(variant)
    shapes = capture_shapes(random_model(config), TOKENS, SEGMENTS)
    assert {"layers", "layers.attention", "layers.mixture.router.probabilities"} <= shapes.keys()
    assert not [name for name in shapes if "#" in name]
    if variant == "gqa":
        assert shapes == {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in captured.items()}


def test_an_unknown_name_is_refused_with_the_known_ones(model):
    with pytest.raises(InputError, match=r"no intermediate value 'layers\.atention'; it has .*layers\.attention, "):
        jax.eval_shape(lambda model: capture(model, TOKENS, ("norm", "layers.atention")), model)


def test_capturing_changes_neither_the_results_nor_their_gradients():
    model = random_model(tiny_config("bare"))

    def program(hidden):
        return str(jax.make_jaxpr(jax.value_and_grad(lambda model: jnp.sum(hidden(model)), allow_int=True))(model))

    def captured(model):
        first, second = capture(model, TOKENS, ("norm", "hidden_bsd")).values()
        assert first is second
        return first

    assert program(captured) == program(lambda model: model(TOKENS).hidden_bsd)


def test_a_second_call_in_a_layer_has_a_number():
    from zaya_jax.model.capture import _note

    values = {}
    for number in range(3):
        _note(values, ("*",), "norm", jnp.asarray(number))
    assert {name: int(x) for name, x in values.items()} == {"norm": 0, "norm#2": 1, "norm#3": 2}
