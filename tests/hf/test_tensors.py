"""The table of tensors covers the model, once each, and changes layouts without arithmetic."""

import numpy as np
import pytest

from tests.helpers import VARIANTS, tiny_config
from zaya_jax.errors import InputError
from zaya_jax.hf.tensors import tensors
from zaya_jax.model import arithmetic
from zaya_jax.model.experts import ROUTERS
from zaya_jax.model.hf_names import same
from zaya_jax.model.tree import abstract_weights
from zaya_jax.model.zaya import ATTENTION

every_variant = pytest.mark.parametrize("variant", VARIANTS)


@every_variant
def test_tensors_fill_every_value_once(variant):
    config = tiny_config(variant, attention_bias=variant == "sliding")
    weights, filled = abstract_weights(config), {}
    for tensor in tensors(config):
        count = filled.setdefault(tensor.leaf, np.zeros(weights[tensor.leaf].shape, int))
        place = count if tensor.group is None else count[tensor.group]
        place = place if tensor.part is None else place[tensor.part]
        assert tensor.to_ours(np.zeros(tensor.shape)).shape == place.shape, tensor.name
        place += 1
    inert = filled["blocks.0.mixture.router.state_scale"][0]
    assert not inert.any(), "the first layer has no state to scale"
    inert += 1
    for leaf, count in filled.items():
        assert (count == 1).all(), leaf
    assert len(filled) == len(weights), "no parameter without a tensor"


@every_variant
def test_names_are_unique_and_sizes_add_up(variant):
    config = tiny_config(variant)
    rows = list(tensors(config))
    names = [tensor.name for tensor in rows]
    assert len(set(names)) == len(names)
    size = sum(np.prod(t.shape) for t in rows if not t.name.endswith("balancing_biases"))
    assert size == arithmetic.total_parameters(config)


@every_variant
def test_layouts_undo_each_other_and_keep_every_bit(variant):
    rng = np.random.default_rng(0)
    for tensor in tensors(tiny_config(variant)):
        theirs = rng.normal(size=tensor.shape).astype(np.float32)
        ours = tensor.to_ours(theirs)
        np.testing.assert_array_equal(tensor.to_theirs(ours), theirs)
        np.testing.assert_array_equal(np.sort(ours, axis=None), np.sort(theirs, axis=None))


def row(config, name):
    return next(tensor for tensor in tensors(config) if tensor.name == name)


class Own:
    """A form of attention or router whose tensor has another name."""

    @staticmethod
    def hf_tensors(config):
        yield same("own.weight", "own", config.hidden_size)


@pytest.mark.parametrize(("table", "replaced", "path"), [
    (ATTENTION, "cca", ("attention", "own")), (ROUTERS, "zaya", ("mixture", "router", "own")),
])  # fmt: skip
def test_another_attention_or_router_brings_its_own_names(table, replaced, path, monkeypatch):
    config = tiny_config("sliding")
    before = {tensor.leaf for tensor in tensors(config)}
    monkeypatch.setitem(table, replaced, Own)
    after = {tensor.leaf for tensor in tensors(config)}
    own = {".".join(("blocks", str(position), *path)) for position in range(len(config.period))}
    assert after - before == own
    part = ".".join(path[:-1])
    assert not [name for name in before & after if f".{part}." in name]


@pytest.mark.parametrize("changed", [{"attention": "gqa"}, {"router": "linear"}])
def test_a_part_without_names_is_refused(changed):
    with pytest.raises(InputError, match="|".join(f"{key}={value}" for key, value in changed.items())):
        list(tensors(tiny_config(**changed)))


def test_linear_weights_are_transposed():
    config = tiny_config("sliding")
    tensor = row(config, "model.layers.3.self_attn.qkv_proj.k_proj.weight")
    assert (tensor.leaf, tensor.group) == ("blocks.1.attention.key", 1)
    assert tensor.shape == (config.kv_size, config.hidden_size)
    x = np.arange(np.prod(tensor.shape)).reshape(tensor.shape)
    np.testing.assert_array_equal(tensor.to_ours(x), x.T)


def test_convolutions_are_laid_out_by_head():
    """Theirs: output channel of all heads, input channel of the head, tap; ours: tap, head, input, output."""
    config = tiny_config("biased")
    c = config.head_dim
    grouped = row(config, "model.layers.0.self_attn.qkv_proj.conv_qk_grouped.weight")
    theirs = np.arange(np.prod(grouped.shape)).reshape(grouped.shape)
    ours = grouped.to_ours(theirs)
    for tap, head, channel_in, channel_out in ((0, 0, 0, 0), (2, 3, 5, 1), (1, 4, 0, 7)):
        assert ours[tap, head, channel_in, channel_out] == theirs[head * c + channel_out, channel_in, tap]
    depthwise = row(config, "model.layers.0.self_attn.qkv_proj.conv_qk_depthwise.weight")
    theirs = np.arange(np.prod(depthwise.shape)).reshape(depthwise.shape)
    ours = depthwise.to_ours(theirs)
    for tap, head, channel in ((0, 0, 0), (3, 4, 7), (2, 1, 3)):
        assert ours[tap, head, channel] == theirs[head * c + channel, 0, tap]


def test_optional_tensors_are_there_when_asked_for():
    with_biases = {t.name for t in tensors(tiny_config("biased"))}
    without = {t.name for t in tensors(tiny_config("biased", attention_bias=False, head_bias=False))}
    assert with_biases - without == {"lm_head.bias"} | {
        f"model.layers.{layer}.self_attn.{name}.bias"
        for layer in range(2)
        for name in (
            "o_proj",
            "qkv_proj.q_proj",
            "qkv_proj.k_proj",
            "qkv_proj.v_proj_current",
            "qkv_proj.v_proj_delayed",
        )
    }
