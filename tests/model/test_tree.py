import chex
import jax
import jax.numpy as jnp
import pytest

from tests.helpers import ABLATIONS, VARIANTS, random_model, random_values, tiny_config
from zaya_jax.model import tree
from zaya_jax.model.layers import MATRIX_ROLES, ROLES
from zaya_jax.model.zaya import abstract_model

every_variant = pytest.mark.parametrize("variant", [*VARIANTS, *ABLATIONS])


@every_variant
def test_every_parameter_has_a_role_and_a_name_of_its_own(variant):
    config = tiny_config(variant)
    model = random_model(config)
    roles, params, biases = tree.roles(model), tree.parameters(model), tree.balancing_biases(model)
    assert roles.keys() == params.keys()
    assert set(roles.values()) <= set(ROLES)
    assert not params.keys() & biases.keys()
    assert len(params) + len(biases) == len(jax.tree.leaves(model)), "nothing is left out"
    assert len(biases) == len(config.period)
    assert tree.roles(abstract_model(config)) == roles


def test_names_say_where_a_parameter_stands():
    roles = tree.roles(abstract_model(tiny_config("sliding", attention_bias=True, head_bias=True)))
    expected = {
        "embedding": "embedding",
        "input_scale": "scale",
        "input_bias": "bias",
        "norm.weight": "norm",
        "head_bias": "bias",
        "blocks.0.attention.query": "attention",
        "blocks.1.attention.output": "attention",
        "blocks.1.attention.grouped": "convolution",
        "blocks.1.attention.depthwise": "convolution",
        "blocks.0.attention.grouped_bias": "bias",
        "blocks.0.attention.temperature": "temperature",
        "blocks.0.attention.projection_bias": "bias",
        "blocks.0.attention_merge.residual_scale": "scale",
        "blocks.0.mixture.router.down": "router",
        "blocks.0.mixture.router.output": "router",
        "blocks.0.mixture.router.state_scale": "scale",
        "blocks.0.mixture.router.norm.weight": "norm",
        "blocks.0.mixture.experts.gate_up": "expert",
        "blocks.1.mixture.experts.down": "expert",
    }
    assert expected.items() <= roles.items()


@every_variant
def test_what_stands_side_by_side_in_one_parameter_is_told(variant):
    config = tiny_config(variant)
    expected = {f"blocks.{index}.mixture.experts.gate_up": 2 for index in range(len(config.period))}
    assert tree.fused(random_model(config)) == tree.fused(abstract_model(config)) == expected


@every_variant
def test_matrices_stand_in_the_last_two_axes(variant):
    model = random_model(tiny_config(variant))
    roles = tree.roles(model)
    for name, x in tree.parameters(model).items():
        stack = 1 if name.startswith("blocks.") else 0
        if roles[name] in MATRIX_ROLES:
            assert x.ndim == stack + 2 + (roles[name] == "expert"), name
        elif roles[name] not in ("embedding", "convolution"):
            assert x.ndim <= stack + 2, name  # convolution biases are [heads, channels]


@every_variant
def test_values_put_into_a_model_come_out_again(variant):
    config = tiny_config(variant)
    values = random_values(config, seed=7)
    model = tree.with_values(abstract_model(config), values)
    chex.assert_trees_all_equal({**tree.parameters(model), **tree.balancing_biases(model)}, values)
    assert tree.roles(model) == tree.roles(abstract_model(config))
    assert model.config == config
    again = tree.with_values(random_model(config), values)
    chex.assert_trees_all_equal(tree.parameters(again), tree.parameters(model))
    assert jax.tree.structure(again) == jax.tree.structure(model)


def test_a_value_that_is_missing_is_named():
    values = dict(random_values(tiny_config()))
    del values["blocks.0.attention.query"]
    with pytest.raises(KeyError, match=r"blocks\.0\.attention\.query"):
        tree.with_values(abstract_model(tiny_config()), values)


def test_matrices_are_cast_and_vectors_are_not():
    config = tiny_config("biased")
    model = random_model(config)
    roles, params = tree.roles(model), tree.parameters(model)
    dtypes = tree.compute_dtypes(roles, "bfloat16")
    assert list(dtypes) == list(params)
    for name, dtype in dtypes.items():
        cast = roles[name] in (*MATRIX_ROLES, "embedding", "convolution")
        assert dtype == (jnp.bfloat16 if cast else jnp.float32)
    low = {name: x.astype(dtypes[name]) for name, x in params.items()}
    assert tree.with_values(model, {**low, **tree.balancing_biases(model)}).dtype == jnp.bfloat16
    assert set(tree.compute_dtypes(roles, "float32").values()) == {jnp.dtype("float32")}
    assert set(tree.compute_dtypes(roles, "float64").values()) == {jnp.dtype("float64")}


def test_abstract_weights_of_a_64_bit_run_do_not_stay_for_others():
    config = tiny_config("plain", num_layers=3)
    with jax.enable_x64(True):
        abstract_model(config)
        assert {str(x.dtype) for x in tree.abstract_weights(config).values()} == {"float32", "float64"}
    assert {str(x.dtype) for x in tree.abstract_weights(config).values()} == {"float32"}
