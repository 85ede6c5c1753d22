"""Folders of `transformers`: written, read, written again, and what is said of damaged ones."""

import json

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.checkpoint.saved_helpers import bits
from tests.helpers import VARIANTS, random_model, random_values, tiny_config
from zaya_jax.errors import InputError
from zaya_jax.hf.pretrained import load_pretrained, save_pretrained
from zaya_jax.model import tree
from zaya_jax.model.zaya import abstract_model

INDEX = "model.safetensors.index.json"
QUERY = "model.layers.1.self_attn.qkv_proj.q_proj.weight"


def model_of(variant, dtype):
    config = tiny_config(variant, attention_bias=variant in ("biased", "sliding"))
    values, empty = random_values(config), abstract_model(config)
    params = {name: jnp.asarray(np.asarray(values[name]).astype(jnp.dtype(dtype))) for name in tree.roles(empty)}
    return tree.with_values(empty, {**values, **params})


def assert_equal(ours, theirs):
    """All values but the first layer's inert γ, which comes back as one."""
    assert tree.roles(ours) == tree.roles(theirs)
    first, second = ({**tree.parameters(m), **tree.balancing_biases(m)} for m in (ours, theirs))
    name = "blocks.0.mixture.router.state_scale"
    np.testing.assert_array_equal(first[name][0], 1)
    first[name], second[name] = first[name][1:], second[name][1:]
    chex.assert_trees_all_equal(first, second)
    chex.assert_trees_all_equal_dtypes(first, second)


QUICK = [("plain", "bfloat16"), ("biased", "float32"), ("sliding", "bfloat16")]
REST = [(variant, dtype) for variant in VARIANTS for dtype in ("float32", "bfloat16") if (variant, dtype) not in QUICK]


@pytest.mark.parametrize(("variant", "dtype"), [*QUICK, *(pytest.param(*one, marks=pytest.mark.soak) for one in REST)])
def test_a_round_trip_keeps_every_bit(variant, dtype, tmp_path):
    model = model_of(variant, dtype)
    save_pretrained(model, tmp_path / "first")
    loaded = load_pretrained(tmp_path / "first", dtype)
    assert_equal(loaded, model)
    save_pretrained(loaded, tmp_path / "second")
    assert bits(tmp_path / "first") == bits(tmp_path / "second")
    assert (tmp_path / "first/config.json").read_bytes() == (tmp_path / "second/config.json").read_bytes()
    stored = {kind for name, (kind, _, _) in bits(tmp_path / "first").items() if not name.endswith("balancing_biases")}
    assert stored == {dtype}
    assert json.loads((tmp_path / "first/config.json").read_text())["dtype"] == dtype


def test_balancing_biases_are_float32_whatever_the_model_is(tmp_path):
    save_pretrained(model_of("plain", "bfloat16"), tmp_path)
    kinds = {name: kind for name, (kind, _, _) in bits(tmp_path).items() if name.endswith("balancing_biases")}
    assert set(kinds.values()) == {"float32"}
    assert len(kinds) == 2
    chex.assert_type(list(tree.balancing_biases(load_pretrained(tmp_path, jnp.bfloat16)).values()), jnp.float32)


def test_the_dtype_asked_for_is_what_comes(tmp_path):
    model = model_of("plain", "float32")
    save_pretrained(model, tmp_path)
    assert load_pretrained(tmp_path).dtype == jnp.float32
    low = load_pretrained(tmp_path, jnp.bfloat16)
    for name, x in tree.parameters(low).items():
        if not name.endswith("state_scale"):
            np.testing.assert_array_equal(x, tree.parameters(model)[name].astype(jnp.bfloat16))


def test_one_layer_alone_has_no_state_scale_in_its_folder(tmp_path):
    model = random_model(tiny_config(num_layers=1))
    save_pretrained(model, tmp_path / "model")
    for dtype in (jnp.float32, None):
        loaded = load_pretrained(tmp_path / "model", dtype)
        gamma = tree.parameters(loaded)["blocks.0.mixture.router.state_scale"]
        np.testing.assert_array_equal(gamma, np.ones((1, 8), np.float32))
        assert gamma.dtype == jnp.float32


def test_the_stored_dtype_is_kept_where_none_is_asked_for(tmp_path):
    model = model_of("plain", "bfloat16")
    save_pretrained(model, tmp_path / "hf", "legacy")
    assert_equal(load_pretrained(tmp_path / "hf", None), model)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.qkv.temp"
    tensors[name] = tensors[name].astype(np.float32)
    path.unlink()
    save_file(tensors, path)
    mixed = load_pretrained(tmp_path / "hf", None)
    kinds = {name: x.dtype for name, x in tree.parameters(mixed).items()}
    assert {name for name, kind in kinds.items() if kind == np.float32} == {"blocks.0.attention.temperature"}
    assert mixed.dtype == jnp.bfloat16


def test_a_model_without_a_part_of_zaya1_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match=r"model\.attention is 'gqa'"):
        save_pretrained(random_model(tiny_config(attention="gqa")), tmp_path / "new")
    assert not (tmp_path / "new").exists()
