"""Parameters out of folders: any configuration, any layout of devices, without a copy of the whole."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from tests.checkpoint.saved_helpers import bits, set_value
from tests.helpers import random_values, tiny_config
from tests.train_helpers import on_devices
from zaya_jax.config import ParallelConfig
from zaya_jax.errors import InputError
from zaya_jax.hf import importer as hf_import
from zaya_jax.hf.exporter import read_arrays, write_folder
from zaya_jax.hf.folder import open_folder
from zaya_jax.hf.importer import read_parameters
from zaya_jax.model import tree
from zaya_jax.model.zaya import abstract_model
from zaya_jax.parallel.mesh import make_mesh
from zaya_jax.parallel.rules import place_leaves

QUERY = "model.layers.1.self_attn.qkv_proj.q_proj.weight"
GAMMA = "blocks.0.mixture.router.state_scale"
BIAS = "blocks.0.mixture.router.balancing_bias"
GATE_UP = "blocks.0.mixture.experts.gate_up"


@st.composite
def configs(draw):
    """Small architectures: periods of one, two and none, kernels, odd sizes, biases."""
    kv, pattern = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([("full",), ("full", "sliding"),
                                                                         ("sliding", "full", "full")]))  # fmt: skip
    return tiny_config(
        vocab_size=draw(st.integers(3, 41)), hidden_size=draw(st.sampled_from([5, 24])), num_kv_heads=kv,
        num_query_heads=kv * draw(st.integers(1, 2)), head_dim=draw(st.sampled_from([4, 6])),
        num_experts=draw(st.integers(1, 5)), expert_size=draw(st.sampled_from([3, 12])),
        router_size=draw(st.sampled_from([3, 8])), layer_pattern=pattern,
        num_layers=len(pattern) * draw(st.integers(1, 2)),
        sliding_window=3, depthwise_kernel=draw(st.integers(1, 3)), grouped_kernel=draw(st.integers(1, 3)),
        attention_bias=draw(st.booleans()), head_bias=draw(st.booleans()), rotary_fraction=1.0,
    )  # fmt: skip


def values_of(config, dtype="float32"):
    """Values at random, γ of the first layer one, trained ones in `dtype`."""
    values, roles = jax.device_get(random_values(config)), tree.roles(abstract_model(config))
    values[GAMMA] = np.array(values[GAMMA])
    values[GAMMA][0] = 1
    return {name: x.astype(jnp.dtype(dtype)) if name in roles else x for name, x in values.items()}


def abstract_of(values, sharding=None, dtype=None):
    target = sharding or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return {name: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=target) for name, x in values.items()}


JOURNEYS = {
    "config": configs(),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "shard": st.sampled_from([2000, 10**9]),
}


def test_both_layouts_come_back_bitwise(tmp_path):
    """Two kinds of layers, an odd number of experts, biases; in bf16, some shards."""
    config = tiny_config(
        hidden_size=5, num_kv_heads=3, num_query_heads=6, head_dim=6, num_experts=5, expert_size=3, router_size=3,
        layer_pattern=("full", "sliding"), num_layers=4, sliding_window=3, depthwise_kernel=3,
        grouped_kernel=1, attention_bias=True, head_bias=True, rotary_fraction=1.0,
    )  # fmt: skip
    journey(tmp_path, config, "bfloat16", 2000)


@pytest.mark.soak
@settings(max_examples=30)
@given(**JOURNEYS)
def test_both_layouts_of_many_models_come_back_bitwise(config, dtype, shard, tmp_path_factory):
    journey(tmp_path_factory.mktemp("journey"), config, dtype, shard)


def journey(folder, config, dtype, shard):
    """The 40-layer folder, read, written in the legacy layout, read as fp32, written again: the first one's bytes."""
    values = values_of(config, dtype)
    write_folder(folder / "first", config, read_arrays(values), dtype, max_shard_bytes=shard)
    for name, layout, written in (("first", "legacy", "second"), ("second", "hf", "third")):
        opened = open_folder(folder / name)
        assert opened.legacy == (name == "second")
        assert dataclasses.replace(opened.config, layer_pattern=config.layer_pattern, sliding_window=3) == config
        expected = values if name == "first" else {key: x.astype(np.float32) for key, x in values.items()}
        loaded = jax.device_get(read_parameters(opened, abstract_of(expected)))
        assert loaded.keys() == values.keys()
        for key, x in expected.items():
            assert (loaded[key].dtype, loaded[key].tobytes()) == (x.dtype, x.tobytes()), key
        write_folder(folder / written, config, read_arrays(loaded), dtype, layout, max_shard_bytes=shard)
    assert bits(folder / "first") == bits(folder / "third")
    first, second = bits(folder / "first"), bits(folder / "second")
    assert sum(len(raw) for *_, raw in first.values()) == sum(len(raw) for *_, raw in second.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder in bf16, its values, and its configuration."""
    config = tiny_config("sliding", attention_bias=True, num_experts=8, hidden_size=32, expert_size=16)
    path, values = tmp_path_factory.mktemp("folder") / "model", values_of(config, "bfloat16")
    write_folder(path, config, read_arrays(values), "bfloat16")
    return path, values, config


SOME = ("embedding", "blocks.1.attention.query", GAMMA, GATE_UP)  # tensors with an axis of vocabulary, of heads, none


def test_what_is_compiled_depends_on_shapes_and_not_on_layers(tmp_path):
    """Those of one leaf are compiled once, for all groups of layers."""
    config = tiny_config(num_layers=6)
    values = {name: x for name, x in values_of(config).items() if name in (GAMMA, GATE_UP)}
    write_folder(tmp_path, config, read_arrays(values_of(config)), "float32")
    writer = hf_import._writer(jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    before = writer._cache_size()
    read_parameters(open_folder(tmp_path), abstract_of(values))
    assert writer._cache_size() == before + len(values)


@pytest.mark.parametrize("change", ["extra", "narrow", "shallow"])
def test_parameters_of_another_architecture_are_refused_before_memory_is_taken(folder, change, monkeypatch):
    path, values, _ = folder
    monkeypatch.setattr(hf_import, "_allocate", lambda _: pytest.fail("allocated"))
    abstract, name = abstract_of(values), "blocks.1.attention.query"
    shape = values[name].shape
    if change == "extra":
        abstract = {**abstract, f"{name}_more": abstract[name]}
    else:
        shape = (*shape[:-1], shape[-1] - 1) if change == "narrow" else (1, *shape[1:])
        abstract[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
    with pytest.raises(InputError, match=name.replace(".", r"\.")):
        read_parameters(open_folder(path), abstract)


@pytest.mark.parametrize(("value", "dtype", "message"), [
    (np.nan, "float32", "NaN or infinite"), (-np.inf, "bfloat16", "NaN or infinite"),
    (3.4e38, "bfloat16", "beyond the range of bfloat16")])  # fmt: skip
def test_a_value_that_is_not_finite_is_refused_and_its_tensor_named(folder, value, dtype, message, tmp_path):
    _, values, config = folder
    write_folder(tmp_path / "model", config, read_arrays(values), "float32")
    set_value(tmp_path / "model", QUERY, value)
    leaf = {name: values[name] for name in ("blocks.1.attention.query",)}
    with pytest.raises(InputError, match=rf"The tensor {re.escape(QUERY)} in {tmp_path}/model .*{message}"):
        read_parameters(open_folder(tmp_path / "model"), abstract_of(leaf, dtype=dtype))


def read_on_devices(path: str, names: tuple[str, ...], parallel: ParallelConfig):
    """Parameters read into the shards of a layout; runs where there are devices."""
    opened = open_folder(path)
    model, mesh = abstract_model(opened.config), make_mesh(parallel)
    placed = place_leaves(tree.shapes(model), tree.roles(model), mesh)
    shapes = {**tree.shapes(model), **{n: x.shape for n, x in jax.eval_shape(tree.balancing_biases, model).items()}}
    specs = {name: placed[name].stored if name in placed else PartitionSpec() for name in shapes}
    abstract = {name: jax.ShapeDtypeStruct(shapes[name], jnp.float32, sharding=NamedSharding(mesh, specs[name]))
                for name in names}  # fmt: skip
    loaded = read_parameters(opened, abstract)
    assert all(x.sharding == abstract[name].sharding for name, x in loaded.items())
    split = [name for name, x in loaded.items() if x.addressable_shards[0].data.size < x.size]
    text = _collectives(loaded["blocks.0.mixture.experts.gate_up"])
    return {name: np.asarray(x) for name, x in loaded.items()}, split, text


def _collectives(leaf):
    """The collectives in what writes a layer's experts, sharded like all of them."""
    here = NamedSharding(leaf.sharding.mesh, PartitionSpec(*leaf.sharding.spec[1:]))
    layer = jax.ShapeDtypeStruct(leaf.shape[1:], jnp.bfloat16, sharding=here)
    lowered = hf_import._writer(leaf.sharding).lower(leaf, layer, jax.ShapeDtypeStruct((), np.int32))
    lines = lowered.compile().as_text().splitlines()
    moved = [line for line in lines if " all-" in line or "collective-permute(" in line]
    return [line for line in moved if "pred[]" not in line]  # whether the layer is finite, of one bit


@pytest.mark.parametrize(
    ("parallel", "layout"), [(ParallelConfig(fsdp=8), "legacy"), (ParallelConfig(fsdp=4, expert=2), "hf")]
)
def test_arrays_are_equal_on_eight_devices(folder, parallel, layout, tmp_path):
    _, values, config = folder
    path = tmp_path / "model"
    names = (*SOME, "blocks.0.attention.query", "blocks.1.mixture.experts.down", BIAS)
    write_folder(path, config, read_arrays(values), "bfloat16", layout)
    here = "tests.hf.test_importer:read_on_devices"
    loaded, split, collectives = on_devices(8, here, str(path), names, parallel)
    assert loaded.keys() == set(names)
    for name, x in loaded.items():
        np.testing.assert_array_equal(x, values[name].astype(np.float32), err_msg=name)
    assert {"embedding", "blocks.0.attention.query", "blocks.1.mixture.experts.down"} <= set(split)
    assert collectives == [], "an expert goes to the devices that hold it, and no other hears of it"
