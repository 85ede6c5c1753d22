"""Adapters by themselves: which matrices have them, and what they add up to."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import assert_close, random_model, random_values, seeds, tiny_config
from zaya_jax.model import tree
from zaya_jax.model.lora import (
    Adapted,
    adapted,
    adapter_names,
    adapter_roles,
    adapter_shapes,
    draw_adapters,
    merge,
    merged,
)
from zaya_jax.model.zaya import abstract_model

MATRICES = {"attention.query", "attention.key", "attention.value_current", "attention.value_delayed",
            "attention.output", "mixture.experts.gate_up", "mixture.experts.down"}  # fmt: skip


def random_adapters(shapes, seed):
    """Adapters of which neither is at its start."""
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.normal(0, 0.2, shape), jnp.float32) for name, shape in shapes.items()}


def of(variant, rank=3):
    model = abstract_model(tiny_config(variant))
    return model, adapter_shapes(tree.shapes(model), tree.roles(model), rank)


@pytest.mark.parametrize("variant", ["plain", "sliding"])
def test_attention_and_experts_have_adapters_and_nothing_else_has(variant):
    model, shapes = of(variant)
    periods = len(model.config.period)
    names = {f"blocks.{place}.{name}" for place in range(periods) for name in MATRICES}
    assert shapes.keys() == {adapter for name in names for adapter in adapter_names(name)}
    assert adapter_roles(tree.roles(model)).keys() == shapes.keys()
    whole = tree.shapes(model)
    for name in names:
        a, b = (shapes[adapter] for adapter in adapter_names(name))
        assert (*a[:-1], b[-1]) == whole[name]
        assert a[-1] == b[-2] == 3
        roles = tree.roles(model)
        assert {adapter_roles(roles)[adapter] for adapter in adapter_names(name)} == {roles[name]}


def test_adapters_begin_at_nothing():
    _, shapes = of("plain", rank=200)
    drawn = draw_adapters(jax.random.key(0), shapes, jnp.float32)
    assert drawn.keys() == shapes.keys()
    for name, x in jax.device_get(drawn).items():
        chex.assert_shape(x, shapes[name])
        if name.endswith("lora_b"):
            assert not np.any(x)
        else:
            assert np.std(x) == pytest.approx(x.shape[-2] ** -0.5, rel=0.1)
    first, second = (drawn[adapter_names(f"blocks.0.attention.{name}")[0]] for name in ("key", "query"))
    assert not np.array_equal(first, second)


@given(seed=seeds(), scale=st.sampled_from([0.5, 2.0]))
def test_the_sum_is_of_base_and_product(seed, scale):
    rank = 3
    rng = np.random.default_rng(seed)
    base, a, b = rng.normal(size=(2, 3, 5, 6)), rng.normal(size=(2, 3, 5, rank)), rng.normal(size=(2, 3, rank, 6))
    expected = base + scale * (a @ b)
    for dtype, band in ((jnp.float32, 1e-6), (jnp.bfloat16, 2e-2)):
        base_low = jnp.asarray(base, dtype)
        product = merge(Adapted(base_low, jnp.float32(a), jnp.float32(b), scale))
        assert product.dtype == dtype
        np.testing.assert_allclose(np.float64(product), expected, atol=band * np.abs(expected).max())
        nothing = merge(Adapted(base_low, jnp.float32(a), jnp.zeros(b.shape, jnp.float32), scale))
        np.testing.assert_array_equal(nothing, base_low)


def test_the_sum_is_rounded_once():
    """Each adapter rounded by itself, or their product, would give another sum."""
    base, a, b = jnp.ones((1, 1), jnp.bfloat16), jnp.full((1, 1), 1 + 2.0**-9), jnp.full((1, 1), 2.0**-8)
    assert float(merge(Adapted(base, a, b, 1.0))[0, 0]) == 1 + 2.0**-7  # just above the middle, so up
    assert float(merge(Adapted(base, jnp.ones((1, 1)), b, 1.0))[0, 0]) == 1.0  # in the middle, so to even


merge_jitted = jax.jit(merge)


def test_a_merged_model_is_made_of_merged_layers():
    model, shapes = of("sliding")
    values = random_values(tiny_config("sliding"))
    params = {name: values[name] for name in tree.shapes(model)}
    adapters = random_adapters(shapes, 1)
    whole = jax.device_get(merged(params, adapters, 2.0))
    assert whole.keys() == params.keys()
    joined = jax.device_get(adapted({**params, **adapters}, 2.0))
    for name, x in whole.items():
        pair = joined[name]
        if not isinstance(pair, Adapted):
            assert adapter_names(name)[0] not in shapes
            np.testing.assert_array_equal(x, params[name])
            continue
        for layer in range(x.shape[0]):
            piece = merge_jitted(Adapted(pair.base[layer], pair.a[layer], pair.b[layer], pair.scale))
            assert_close(x[layer], piece, 1e-6)
            assert not np.array_equal(x[layer], pair.base[layer])


def test_adapters_of_another_model_are_left_out_of_nothing():
    model = random_model(tiny_config())
    params = tree.parameters(model)
    assert adapted(params, 1.0) == params  # without adapters all stays as it is
