"""Folders of `transformers`: written, read, written again, and what is said of damaged ones."""

import json

import chex
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.helpers import VARIANTS, abstract_model, random_model, random_values, tiny_config
from zaya_jax.checkpoint.hf import load_pretrained, save_pretrained
from zaya_jax.checkpoint.hf_export import read_arrays, write_folder
from zaya_jax.errors import InputError
from zaya_jax.model import tree

INDEX = "model.safetensors.index.json"
QUERY = "model.layers.1.self_attn.qkv_proj.q_proj.weight"


def model_of(variant, dtype):
    config = tiny_config(variant, attention_bias=variant in ("biased", "sliding"))
    values, empty = random_values(config), abstract_model(config)
    params = {name: jnp.asarray(np.asarray(values[name]).astype(jnp.dtype(dtype))) for name in tree.roles(empty)}
    return tree.with_values(empty, {**values, **params})


def bits(folder):
    """Every tensor of the folder as bytes, with its dtype and shape."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, x in load_file(path).items():
            found[name] = (x.dtype.name, x.shape, x.tobytes())
    return found


def assert_equal(ours, theirs):
    """All values but the first layer's inert γ, which comes back as one."""
    assert tree.roles(ours) == tree.roles(theirs)
    first, second = ({**tree.parameters(m), **tree.balancing_biases(m)} for m in (ours, theirs))
    name = "blocks.0.mixture.router.state_scale"
    np.testing.assert_array_equal(first[name][0], 1)
    first[name], second[name] = first[name][1:], second[name][1:]
    chex.assert_trees_all_equal(first, second)
    chex.assert_trees_all_equal_dtypes(first, second)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS)
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


@pytest.fixture
def sharded(tmp_path):
    model = model_of("sliding", "float32")
    save_pretrained(model, tmp_path / "whole")
    values = {**tree.parameters(model), **tree.balancing_biases(model)}
    write_folder(tmp_path / "sharded", model.config, read_arrays(values), "float32", max_shard_bytes=12_000)
    return model, tmp_path


def test_shards_hold_the_same(sharded):
    model, folder = sharded
    paths = sorted((folder / "sharded").glob("*.safetensors"))
    assert len(paths) > 2
    assert paths[0].name == f"model-00001-of-{len(paths):05d}.safetensors"
    assert bits(folder / "sharded") == bits(folder / "whole")
    assert not (folder / "whole" / INDEX).exists()
    index = json.loads((folder / "sharded" / INDEX).read_text())
    assert index["weight_map"] == {name: path.name for path in paths for name in load_file(path)}
    assert index["metadata"]["total_size"] == sum(len(raw) for _, _, raw in bits(folder / "whole").values())
    for path in paths:
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(x.nbytes for x in tensors.values()) <= 12_000
    assert_equal(load_pretrained(folder / "sharded"), model)


def refused(folder):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(InputError) as caught:
        load_pretrained(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return str(caught.value)


def changed_index(folder, change):
    path = folder / "sharded" / INDEX
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    return refused(folder / "sharded")


@pytest.mark.parametrize("file", ["../whole/model.safetensors", "/etc/passwd", "sub/x.safetensors", 3, None])
def test_an_index_leads_nowhere_else(sharded, file):
    message = changed_index(sharded[1], lambda index: index["weight_map"].update({QUERY: file}))
    assert QUERY in message
    assert repr(file) in message


@pytest.mark.parametrize("file", ["..", ".", ""])
def test_an_index_that_names_a_folder_is_refused(sharded, file):
    changed_index(sharded[1], lambda index: index["weight_map"].update({QUERY: file}))


def test_shards_that_do_not_fit_their_index_are_named(sharded):
    _, folder = sharded
    names = list(json.loads((folder / "sharded" / INDEX).read_text())["weight_map"].values())
    other = next(name for name in names if name != names[0])
    message = changed_index(folder, lambda index: index["weight_map"].update({"model.embed_tokens.weight": other}))
    assert "model.embed_tokens.weight" in message
    assert other in message
    assert "weight_map" in changed_index(folder, lambda index: index.update(weight_map=[]))
    assert "weight_map" in changed_index(folder, lambda index: index.pop("weight_map"))


def test_a_missing_shard_is_named(sharded):
    _, folder = sharded
    path = sorted((folder / "sharded").glob("*.safetensors"))[1]
    path.unlink()
    assert path.name in refused(folder / "sharded")


def test_a_truncated_shard_is_named(sharded):
    _, folder = sharded
    path = sorted((folder / "sharded").glob("*.safetensors"))[1]
    path.write_bytes(path.read_bytes()[:-5])
    assert path.name in refused(folder / "sharded")


@pytest.fixture
def saved(tmp_path):
    save_pretrained(random_model(tiny_config()), tmp_path)
    return tmp_path


def rewrite(folder, change):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)
    return refused(folder)


def test_a_missing_tensor_is_named(saved):
    assert f"The tensor {QUERY} is missing" in rewrite(saved, lambda tensors: tensors.pop(QUERY))


def test_an_extra_tensor_is_named(saved):
    gamma = "model.layers.0.mlp.gate.router_states_scale"
    assert gamma in rewrite(saved, lambda tensors: tensors.update({gamma: np.ones(8, np.float32)}))


@pytest.mark.parametrize("change", [lambda x: x[:-1], lambda x: x.T, lambda x: x[None]])
def test_a_misshapen_tensor_is_named_with_both_shapes(saved, change):
    message = rewrite(saved, lambda tensors: tensors.update({QUERY: np.ascontiguousarray(change(tensors[QUERY]))}))
    assert QUERY in message
    assert "[32, 24]" in message


def test_a_tied_head_may_be_stored_again(saved):
    path = saved / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    path.unlink()
    save_file(tensors, path)
    load_pretrained(saved)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(saved, keep):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors is not a whole safetensors file" in refused(saved)


def test_a_configuration_of_another_size_is_found_out(saved):
    path = saved / "config.json"
    tree_ = json.loads(path.read_text())
    path.write_text(json.dumps({**tree_, "vocab_size": 38}))
    assert "model.embed_tokens.weight" in refused(saved)
    path.write_text(json.dumps({**tree_, "model_type": "llama"}))
    assert "config.json has model_type 'llama'" in refused(saved)
    path.write_text(json.dumps({**tree_, "hidden_act": "relu"}))
    assert "hidden_act 'relu'" in refused(saved)


@pytest.mark.parametrize(("content", "said"), [(b"{", "is not JSON"), (b"[]", "holds no JSON object"),
                                               (b"\xff\xfe", "is not JSON")])  # fmt: skip
def test_a_damaged_configuration_is_named(saved, content, said):
    (saved / "config.json").write_bytes(content)
    message = refused(saved)
    assert said in message
    assert "config.json" in message


def test_missing_files_are_named(saved, tmp_path):
    (saved / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refused(saved)
    (saved / "config.json").unlink()
    assert "config.json cannot be read" in refused(saved)
    assert "config.json cannot be read" in refused(tmp_path / "nowhere")


def test_nothing_is_written_over(tmp_path):
    model = random_model(tiny_config())
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not an empty folder"):
        save_pretrained(model, tmp_path)
    with pytest.raises(InputError, match=r"notes\.txt exists and is not an empty folder"):
        save_pretrained(model, tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    save_pretrained(model, tmp_path / "empty")
    save_pretrained(model, tmp_path / "deep" / "er")
    assert bits(tmp_path / "empty") == bits(tmp_path / "deep" / "er")


def test_a_model_without_a_part_of_zaya1_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match=r"model\.attention is 'gqa'"):
        save_pretrained(random_model(tiny_config(attention="gqa")), tmp_path / "new")
    assert not (tmp_path / "new").exists()
