import dataclasses
import functools

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoint.saved_helpers import set_value
from tests.data_helpers import small_tokenizer
from tests.helpers import random_model
from tests.train_helpers import MODEL, snapshot
from zaya_jax import save_pretrained
from zaya_jax.checkpoint.__main__ import main
from zaya_jax.checkpoint.reader import open_checkpoint, verify_checkpoint
from zaya_jax.model import tree
from zaya_jax.run.manifest import read_manifest
from zaya_jax.weights.load import open_weights

CONFIGS = {
    "plain": {},
    "sliding": {
        "num_layers": 4,
        "layer_pattern": ("full", "sliding"),
        "sliding_window": 3,
        "attention_bias": True,
        "head_bias": True,
    },
}


@functools.cache
def random(config="plain"):
    """A model, in host memory, where slices are not compiled."""
    return jax.device_get(random_model(dataclasses.replace(MODEL, **CONFIGS[config]), 1))


def without_card(folder):
    """The files of an export but for its card, which says where it comes from."""
    files = snapshot(folder)
    assert files.pop("README.md")
    return files


@pytest.mark.parametrize(("config", "layout"), [("plain", "hf"), ("sliding", "legacy")])
def test_a_folder_is_a_checkpoint_and_a_folder_again(config, layout, tmp_path):
    model = random(config)
    save_pretrained(model, tmp_path / "model", layout)
    assert main(["import-hf", str(tmp_path / "model"), "--output", str(tmp_path / "run")]) == 0
    folder = tmp_path / "run" / "checkpoints" / "0"
    assert verify_checkpoint(folder) == []
    values = {f"params.{name}": x for name, x in tree.parameters(model).items()}
    values |= {f"balance.{name}": x for name, x in tree.balancing_biases(model).items()}
    assert read_manifest(folder).leaves.keys() == values.keys()
    _, reader = open_checkpoint(folder)
    for name, x in values.items():
        imported = reader.read(name)
        same = np.asarray(x).copy()
        if name == "params.blocks.0.mixture.router.state_scale":
            same[0] = 1.0  # inert, and in no folder
        np.testing.assert_array_equal(imported, same, err_msg=name)
    assert open_weights(tmp_path / "run").config.hidden_size == model.config.hidden_size
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "back"), "--dtype", "float32", "--layout",
                 layout]) == 0  # fmt: skip
    assert without_card(tmp_path / "back") == snapshot(tmp_path / "model")


def test_the_dtype_stays_and_can_be_cast(tmp_path):
    save_pretrained(jax.tree.map(lambda x: x.astype("bfloat16"), random()), tmp_path / "model")
    main(["import-hf", str(tmp_path / "model"), "--output", str(tmp_path / "run")])
    leaves = read_manifest(tmp_path / "run" / "checkpoints" / "0").leaves
    assert {leaf["dtype"] for name, leaf in leaves.items() if name.startswith("params.")} == {"bfloat16"}
    assert {leaf["dtype"] for name, leaf in leaves.items() if name.startswith("balance.")} == {"float32"}
    main(["export-hf", str(tmp_path / "run"), str(tmp_path / "back")])
    assert without_card(tmp_path / "back") == snapshot(tmp_path / "model")
    main(["export-hf", str(tmp_path / "run"), str(tmp_path / "wide"), "--dtype", "float32"])
    wide, stored = (load_file(tmp_path / name / "model.safetensors") for name in ("wide", "model"))
    assert {x.dtype.name for x in wide.values()} == {"float32"}
    assert {x.dtype.name for name, x in stored.items() if "balancing" not in name} == {"bfloat16"}
    assert wide.keys() == stored.keys()
    assert all(np.array_equal(x, stored[name].astype(np.float32)) for name, x in wide.items())


def test_nan_is_imported_only_where_it_is_asked_for(tmp_path, capsys):
    name = "model.layers.1.self_attn.qkv_proj.q_proj.weight"
    save_pretrained(random(), tmp_path / "model")
    set_value(tmp_path / "model", name, np.nan)
    command = ["import-hf", str(tmp_path / "model"), "--output", str(tmp_path / "run")]
    assert main(command) == 2
    assert f"The tensor {name} in {tmp_path / 'model'} has NaN" in capsys.readouterr().err
    assert not (tmp_path / "run" / "checkpoints" / "0").exists()
    small_tokenizer().save(tmp_path / "model" / "tokenizer.json")
    assert main([*command, "--allow-nonfinite"]) == 0
    text = (tmp_path / "model" / "tokenizer.json").read_text()
    assert (tmp_path / "run" / "tokenizer" / "tokenizer.json").read_text() == text
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "back")]) == 2
    assert f"The tensor {name} has NaN" in capsys.readouterr().err
    assert not (tmp_path / "back").exists()


def test_a_folder_is_imported_in_the_other_form_of_its_name_too(tmp_path, capsys):
    save_pretrained(random(), tmp_path / "model")
    assert main(["import-hf", f"hf:{tmp_path / 'model'}", "--output", str(tmp_path / "run")]) == 0
    assert verify_checkpoint(tmp_path / "run" / "checkpoints" / "0") == []
    assert f"Imported {tmp_path / 'model'} into" in capsys.readouterr().out


def test_what_is_no_folder_is_refused(tmp_path, capsys):
    assert main(["import-hf", str(tmp_path), "--output", str(tmp_path / "run")]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
