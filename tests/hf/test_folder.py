"""What is said of damaged folders, before anything of their tensors is read."""

import contextlib
import json

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from tests.helpers import random_values, tiny_config
from tests.hf.test_safetensors import VALUES
from zaya_jax.errors import InputError
from zaya_jax.hf.config import to_hf
from zaya_jax.hf.exporter import read_arrays, write_folder
from zaya_jax.hf.folder import INDEX, open_folder
from zaya_jax.hf.legacy_config import to_legacy

QUERY = "model.layers.1.self_attn.qkv_proj.q_proj.weight"


def write(folder, config, layout="hf", **options):
    """A folder of `random_values`, read from host arrays: nothing is compiled."""
    write_folder(folder, config, read_arrays(jax.device_get(random_values(config))), "float32", layout, **options)


@pytest.fixture
def sharded(tmp_path):
    write(tmp_path / "whole", tiny_config("sliding"))
    write(tmp_path / "sharded", tiny_config("sliding"), max_shard_bytes=12_000)
    return None, tmp_path


def refused(folder):
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(InputError) as caught:
        open_folder(folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return str(caught.value)


def changed_index(folder, change):
    path = folder / "sharded" / INDEX
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))
    return refused(folder / "sharded")


@pytest.mark.parametrize("file", ["../whole/model.safetensors", "/etc/passwd", "sub/x.safetensors", 3, None,
                                  "x\0.safetensors"])  # fmt: skip
def test_an_index_leads_nowhere_else(sharded, file):
    message = changed_index(sharded[1], lambda index: index["weight_map"].update({QUERY: file}))
    assert QUERY in message
    assert repr(file) in message


@pytest.mark.parametrize("file", ["\ud800.safetensors", 300 * "x" + ".safetensors"])
def test_a_file_name_that_no_disk_takes_is_refused(sharded, file):
    assert "cannot be read" in changed_index(sharded[1], lambda index: index["weight_map"].update({QUERY: file}))


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    return tmp_path_factory.mktemp("empty")


@settings(max_examples=3 * settings.default.max_examples)
@given(weight_map=st.dictionaries(st.text(max_size=9), VALUES | st.text(max_size=9).map("{}.safetensors".format),
                                  max_size=4), rest=VALUES)  # fmt: skip
def test_an_index_of_any_json_is_refused(empty, weight_map, rest):
    (empty / "config.json").write_text("{}")
    (empty / INDEX).write_text(json.dumps({"weight_map": weight_map} if weight_map else rest))
    with pytest.raises(InputError):
        open_folder(empty)


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
    write(tmp_path, tiny_config())
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
    open_folder(saved)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_file_is_named(saved, keep):
    path = saved / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    assert "model.safetensors is not a valid safetensors file" in refused(saved)


def test_a_configuration_of_another_size_is_found_out(saved):
    path = saved / "config.json"
    tree_ = json.loads(path.read_text())
    path.write_text(json.dumps({**tree_, "vocab_size": 38}))
    assert "model.embed_tokens.weight" in refused(saved)
    path.write_text(json.dumps({**tree_, "model_type": "llama"}))
    assert "config.json has model_type 'llama'" in refused(saved)
    path.write_text(json.dumps({**tree_, "hidden_act": "relu"}))
    assert "hidden_act 'relu'" in refused(saved)


HUGE = 10**30
CONFIGURED = sorted({*to_hf(tiny_config("sliding"), "float32")} | {*to_legacy(tiny_config("sliding"), "float32")})


@pytest.fixture(scope="module", params=["hf", "legacy"])
def changing(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("changing")
    write(folder, tiny_config("sliding"), request.param)
    return folder


@settings(max_examples=3 * settings.default.max_examples)
@given(changes=st.dictionaries(st.sampled_from(CONFIGURED), VALUES | st.just(HUGE), min_size=1, max_size=2))
@example(changes={"num_hidden_layers": HUGE, "layer_types": None})
@example(changes={"num_hidden_layers": 2 * 10**9, "layer_types": None})
@example(changes={"num_experts": HUGE})
@example(changes={"rms_norm_eps": 10**400, "norm_epsilon": 10**400})
def test_a_configuration_of_any_json_is_read_or_refused(changing, changes):
    path = changing / "config.json"
    before = path.read_text()
    path.write_text(json.dumps({**json.loads(before), **changes}))
    try:
        with contextlib.suppress(InputError):
            open_folder(changing)
    finally:
        path.write_text(before)


@pytest.mark.parametrize(("content", "sentence"), [(b"{", "is not JSON"), (b"[]", "is not a JSON object"),
                                               (b"\xff\xfe", "is not JSON")])  # fmt: skip
def test_a_damaged_configuration_is_named(saved, content, sentence):
    (saved / "config.json").write_bytes(content)
    message = refused(saved)
    assert sentence in message
    assert "config.json" in message


def test_missing_files_are_named(saved, tmp_path):
    (saved / "model.safetensors").unlink()
    assert "model.safetensors is missing" in refused(saved)
    (saved / "config.json").unlink()
    assert "config.json cannot be read" in refused(saved)
    assert "nowhere does not exist" in refused(tmp_path / "nowhere")


def test_a_tensor_that_the_index_does_not_place_is_named(sharded):
    message = changed_index(sharded[1], lambda index: index["weight_map"].pop(QUERY))
    assert f"The tensor {QUERY} is in" in message
    assert "does not place it" in message


def test_a_head_that_is_not_the_embedding_is_refused(saved):
    def untied(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["lm_head.weight"][5, 3] += 1

    assert "lm_head.weight" in rewrite(saved, untied)
    assert "[36, 24]" in rewrite(saved, lambda tensors: tensors.update({"lm_head.weight": np.ones((36, 24))}))


@pytest.fixture
def legacy(tmp_path):
    write(tmp_path, tiny_config(num_layers=3), layout="legacy")
    return tmp_path


def test_a_legacy_folder_is_told_by_its_names(legacy):
    opened = open_folder(legacy)
    assert opened.legacy
    assert opened.config.num_layers == 3


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.3.zaya_block.experts.local_experts.2.linear_fc1.weight",
        "model.layers.0.res_scale.hidden_states_bias",
        "model.res_scale.residual_bias",
    ],
)
def test_a_legacy_tensor_is_missed_and_measured(legacy, name):
    def narrow(tensors):
        tensors[name] = np.ascontiguousarray(tensors[name][:-1])

    assert f"The tensor {name} in" in rewrite(legacy, narrow)
    assert f"The tensor {name} is missing" in rewrite(legacy, lambda tensors: tensors.pop(name))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.zaya_block.router.router_states_scale",
        "model.layers.0.res_scale.residual_scale",
        "model.layers.1.zaya_block.experts.local_experts.4.linear_fc1.weight",
    ],
)
def test_a_legacy_tensor_too_many_is_named(legacy, name):
    extra = np.ones(8, np.float32)
    assert f"The tensor {name} in" in rewrite(legacy, lambda tensors: tensors.update({name: extra}))


def test_the_configuration_of_the_other_layout_is_refused(legacy):
    """That of `transformers` beside tensors of the alternating kind."""
    path = legacy / "config.json"
    path.write_text(json.dumps(to_hf(tiny_config(num_layers=3), "float32")))
    assert "the unknown key moe_intermediate_size" in refused(legacy)


def test_quantized_variants_are_refused(saved):
    path = saved / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "fp8"}}))
    assert "quantization_config" in refused(saved)
