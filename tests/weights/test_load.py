"""Weights of every kind through one door: runs, phases, checkpoints and `transformers` folders."""

import dataclasses
import json
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.checkpoint.saved_helpers import bits, flip
from tests.data_helpers import small_tokenizer
from tests.helpers import VARIANTS, random_model, random_values, tiny_config
from tests.train_helpers import CONFIG, MODEL
from zaya_jax import load_model, save_pretrained
from zaya_jax.checkpoint import reader, restore
from zaya_jax.checkpoint.__main__ import main
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import CheckpointConfig, PhaseConfig, to_dict
from zaya_jax.errors import InputError
from zaya_jax.model import tree
from zaya_jax.model.zaya import abstract_model
from zaya_jax.weights.load import open_weights

# On the model of the other tests, so that what places its arrays is compiled once.
QUICK = {
    "plain": MODEL,
    "biased": dataclasses.replace(MODEL, layer_pattern=("full", "sliding"), num_layers=4, sliding_window=4,
                                  sliding_rope_base=500.0, attention_bias=True, head_bias=True, depthwise_kernel=4,
                                  grouped_kernel=3),
}  # fmt: skip
REST = {f"tiny_{name}": tiny_config(name, attention_bias=name in ("biased", "sliding")) for name in VARIANTS}


def model_of(variant, dtype):
    config = (QUICK | REST)[variant]
    values, empty = random_values(config), abstract_model(config)
    params = {name: np.asarray(values[name]).astype(jnp.dtype(dtype)) for name in tree.roles(empty)}
    return tree.with_values(empty, jax.device_get(values) | params)


def values(model):
    """All parameters and balancing biases, in host memory."""
    return jax.device_get({**tree.parameters(model), **tree.balancing_biases(model)})


def assert_equal(ours, theirs):
    """All values but the first layer's inert γ, which comes back as one."""
    assert tree.roles(ours) == tree.roles(theirs)
    first, second = values(ours), values(theirs)
    name = "blocks.0.mixture.router.state_scale"
    np.testing.assert_array_equal(first[name][0], 1)
    first[name], second[name] = first[name][1:], second[name][1:]
    chex.assert_trees_all_equal(first, second)
    chex.assert_trees_all_equal_dtypes(first, second)


@pytest.mark.parametrize(("variant", "dtype"), [
    ("biased", "bfloat16"),
    *(pytest.param(variant, dtype, marks=pytest.mark.soak) for variant in REST for dtype in ("float32", "bfloat16")),
])  # fmt: skip
def test_a_round_trip_keeps_every_bit(variant, dtype, tmp_path):
    model = model_of(variant, dtype)
    save_pretrained(model, tmp_path / "first")
    loaded = load_model(f"hf:{tmp_path / 'first'}", dtype)[0]
    assert_equal(loaded, model)
    save_pretrained(loaded, tmp_path / "second")
    assert bits(tmp_path / "first") == bits(tmp_path / "second")
    assert (tmp_path / "first/config.json").read_bytes() == (tmp_path / "second/config.json").read_bytes()
    stored = {kind for name, (kind, _, _) in bits(tmp_path / "first").items() if not name.endswith("balancing_biases")}
    assert stored == {dtype}
    assert json.loads((tmp_path / "first/config.json").read_text())["dtype"] == dtype


def test_one_layer_alone_has_no_state_scale_in_its_folder(tmp_path):
    model = random_model(dataclasses.replace(MODEL, num_layers=1))
    save_pretrained(jax.device_get(model), tmp_path / "model")
    for dtype in (jnp.float32, None):
        loaded = load_model(f"hf:{tmp_path / 'model'}", dtype)[0]
        gamma = tree.parameters(loaded)["blocks.0.mixture.router.state_scale"]
        np.testing.assert_array_equal(gamma, np.ones((1, 8), np.float32))
        assert gamma.dtype == jnp.float32


def test_the_stored_dtype_is_kept_where_none_is_asked_for(tmp_path):
    model = model_of("plain", "bfloat16")
    save_pretrained(model, tmp_path / "hf", "legacy")
    assert_equal(load_model(f"hf:{tmp_path / 'hf'}", None)[0], model)
    path = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.0.self_attn.qkv.temp"
    tensors[name] = tensors[name].astype(np.float32)
    path.unlink()
    save_file(tensors, path)
    mixed = load_model(f"hf:{tmp_path / 'hf'}", None)[0]
    kinds = {name: x.dtype for name, x in tree.parameters(mixed).items()}
    assert {name for name, kind in kinds.items() if kind == np.float32} == {"blocks.0.attention.temperature"}
    assert mixed.dtype == jnp.bfloat16


def test_a_model_without_a_part_of_zaya1_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(InputError, match=r"model\.attention is 'gqa'"):
        save_pretrained(random_model(tiny_config(attention="gqa")), tmp_path / "new")
    assert not (tmp_path / "new").exists()


# --- every kind ------------------------------------------------------------------------------------------------

PHASES = (PhaseConfig(256, "short"), PhaseConfig(256, "long", rope_base=7.0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder and its two models, one at the end of each phase of a run, the second in a `transformers` folder too."""
    folder = tmp_path_factory.mktemp("saved")
    models = [random_model(MODEL, seed) for seed in (1, 2)]
    config = dataclasses.replace(CONFIG, phases=PHASES)
    with CheckpointStore(folder / "run" / "checkpoints", CheckpointConfig()) as store:
        for step, (phase, model) in enumerate(zip(PHASES, models, strict=True), start=1):
            state = {"params": tree.parameters(model), "balance": tree.balancing_biases(model), "step": jnp.int32(step)}
            store.save(step, state, {"phase": phase.name, "config": to_dict(config)})
    (folder / "run" / "phases.json").write_text(json.dumps({"short": 1, "long": 2}))
    save_pretrained(models[1], folder / "model")
    small_tokenizer().save(folder / "model" / "tokenizer.json")
    assert main(["import-hf", str(folder / "model"), "--output", str(folder / "imported")]) == 0
    return folder, models


KINDS = {
    "{}/run@short": (0, MODEL.rope_base, False), "{}/run": (1, 7.0, False), "{}/run/checkpoints/1":
    (0, MODEL.rope_base, False), "hf:{}/model": (1, MODEL.rope_base, True), "{}/imported": (1, MODEL.rope_base, True),
}  # fmt: skip


@pytest.mark.parametrize("source", KINDS)
def test_a_model_is_what_was_saved_with_the_positions_of_its_phase(saved, source):
    folder, models = saved
    index, rope_base, has_tokenizer = KINDS[source]
    model, tokenizer = load_model(source.format(folder))
    ours, expected = (
        jax.device_get({**tree.parameters(m), **tree.balancing_biases(m)}) for m in (model, models[index])
    )
    gamma = "blocks.0.mixture.router.state_scale"
    if has_tokenizer:  # so it came through a folder, which lacks the first layer's
        expected[gamma] = np.concatenate([np.ones_like(expected[gamma][:1]), expected[gamma][1:]])
    chex.assert_trees_all_equal(ours, expected)
    assert model.config.rope_base == rope_base
    assert (tokenizer is not None) == has_tokenizer
    weights = open_weights(source.format(folder))
    for name, x in expected.items():
        np.testing.assert_array_equal(weights.read(name, 1 if name.startswith("blocks.") else None),
                                      x[1] if name.startswith("blocks.") else x, err_msg=name)  # fmt: skip


@pytest.mark.parametrize("source", ["{}/run@short", "{}/run/checkpoints/1", "{}/imported/checkpoints/0"])
def test_a_manifest_is_read_once(saved, source, monkeypatch):
    weights = open_weights(source.format(saved[0]))
    for module in (reader, restore):
        monkeypatch.setattr(module, "read_manifest", lambda folder, **_: pytest.fail(f"{folder} is read again"))
    chex.assert_tree_all_finite(tree.parameters(weights.load_model(None)))


@pytest.mark.parametrize(
    ("source", "match"),
    [
        ("{}/run@none", "path is .*run@none'.* short, long"),
        ("{}", "path is .* must be a run folder"),
        ("{}/model", "path is .*/model'.* write hf:"),
        ("hf:{}/run", r"run/config\.json cannot be read"),
    ],
)
def test_what_holds_no_weights_is_refused_by_name(saved, source, match):
    with pytest.raises(InputError, match=match):
        load_model(source.format(saved[0]))


def test_damage_is_found_before_a_model_is_returned(saved, tmp_path):
    shutil.copytree(saved[0] / "run" / "checkpoints" / "1", tmp_path / "checkpoints" / "1")
    flip(tmp_path / "checkpoints" / "1")
    with pytest.raises(InputError, match="checkpoints/1"):
        load_model(tmp_path)


def test_a_folder_changes_its_layout_and_dtype(saved, tmp_path):
    folder, models = saved
    source, target = f"hf:{folder / 'model'}", tmp_path / "legacy"
    assert main(["export-hf", source, str(target), "--layout", "legacy", "--dtype", "float32"]) == 0
    assert_equal(load_model(f"hf:{target}")[0], models[1])
    assert (target / "tokenizer.json").read_bytes() == (folder / "model" / "tokenizer.json").read_bytes()
