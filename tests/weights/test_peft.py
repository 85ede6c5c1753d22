"""Adapters as a folder of `peft`: names and layouts are its, and what it cannot hold is refused."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.helpers import assert_close, random_model
from tests.train_helpers import MODEL
from tests.weights.adapter_helpers import LORA, write_adapter_run
from zaya_jax import save_pretrained
from zaya_jax.checkpoint.__main__ import main
from zaya_jax.checkpoint.reader import open_checkpoint
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import CheckpointConfig
from zaya_jax.hf.peft import adapter_tensors
from zaya_jax.hf.tensors import tensors
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.weights.load import BASE

INNER = {"mlp.experts.gate_up_proj": ".base_layer", "mlp.experts.down_proj": ""}  # the wrapper of each parameter
PREFIX = "base_model.model."


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tuned")
    write_adapter_run(folder)
    return folder


def merged_by_hand(base, adapters, e):
    """Merge as `peft` does: x @ A.T @ B.T in linear layers, its `ParamWrapper.get_delta_weight` in experts."""
    merged = dict(base)
    for name, w in base.items():
        module, parameter = name.rsplit(".", 1)
        layer = PREFIX + module + INNER.get(".".join(name.split(".")[3:]), "")
        if f"{layer}.lora_A.weight" not in adapters or (w.ndim == 2 and parameter != "weight"):
            continue
        a, b = (adapters[f"{layer}.lora_{letter}.weight"] for letter in "AB")
        if w.ndim == 3:
            a, b = a.reshape(e, -1, a.shape[-1]), b.reshape(b.shape[0], -1, e)
            merged[name] = w + LORA.alpha / LORA.rank * np.einsum("ore,eri->eoi", b, a)
        else:
            merged[name] = w + LORA.alpha / LORA.rank * b @ a
    return merged


def test_the_adapters_added_as_peft_does_are_the_merged_export(folder, tmp_path):
    assert main(["export-hf", str(folder / "run"), str(tmp_path / "peft"), "--dtype", "float32", "--peft"]) == 0
    assert main(["export-hf", str(folder / "run"), str(tmp_path / "whole"), "--dtype", "float32"]) == 0
    adapters = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    base, whole = (load_file(path / "model.safetensors") for path in (folder / "model", tmp_path / "whole"))
    assert_close(merged_by_hand(base, adapters, MODEL.num_experts), whole, 1e-6)
    assert len(adapters) == 2 * sum(not np.array_equal(base[name], whole[name]) for name in base)
    config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (LORA.rank, LORA.alpha)
    assert config["base_model_name_or_path"] == str(folder / "model")
    assert sorted(INNER) == sorted(config["target_parameters"])
    for name in config["target_modules"]:
        assert f"{PREFIX}model.layers.1.{name}.lora_A.weight" in adapters
    assert {path.name for path in (tmp_path / "peft").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json",
        "generation_config.json", "README.md"}  # fmt: skip
    assert f'base_model: "{folder / "model"}"' in (tmp_path / "peft" / "README.md").read_text()


def test_layouts_can_be_undone():
    rng, r = np.random.default_rng(0), 3
    for matrix in tensors(MODEL):
        if matrix.leaf.endswith(("attention.query", "gate_up", "experts.down")):
            *stack, out, width = matrix.shape
            for row, shape in zip(adapter_tensors(matrix, r), ((width, r), (r, out)), strict=True):
                x = rng.normal(size=(*stack, *shape))
                assert row.to_theirs(x).shape == row.shape
                np.testing.assert_array_equal(row.to_ours(row.to_theirs(x)), x)


def refused(capsys, *arguments):
    assert main(["export-hf", *map(str, arguments), "--peft"]) == 2
    return capsys.readouterr().err


def test_what_peft_cannot_hold_is_refused(folder, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["import-hf", str(folder / "model"), "--output", str(tmp_path / "whole")]) == 0
    assert "trained without adapters (lora.rank)" in refused(capsys, tmp_path / "whole", out)
    assert "--layout legacy cannot be combined" in refused(capsys, folder / "run", out, "--layout", "legacy")
    message = refused(capsys, folder / "run", out, "--base", tmp_path / "whole")
    assert f"{tmp_path / 'whole'} is not a transformers folder. Export it" in message
    save_pretrained(jax.device_get(random_model(MODEL, 1)), tmp_path / "legacy", "legacy")
    assert "has the legacy layout" in refused(capsys, folder / "run", out, "--base", f"hf:{tmp_path / 'legacy'}")
    save_pretrained(jax.device_get(random_model(MODEL, 7)), tmp_path / "other")
    assert "is not the base model" in refused(capsys, folder / "run", out, "--base", f"hf:{tmp_path / 'other'}")
    rope = tmp_path / "rope"
    shutil.copytree(folder / "model", rope)
    tree = json.loads((rope / "config.json").read_text())
    tree["rope_parameters"]["hybrid"]["rope_theta"] = 7.0
    (rope / "config.json").write_text(json.dumps(tree))
    assert "rope_base 10000, but the base model" in refused(capsys, folder / "run", out, "--base", f"hf:{rope}")
    assert not out.exists()


def test_balancing_biases_that_were_trained_are_refused(folder, tmp_path, capsys):
    manifest, reader = open_checkpoint(folder / "run" / CHECKPOINTS / "4")
    state = {kind: {name.partition(".")[2]: jnp.asarray(reader.read(name)) for name in manifest.leaves
                    if name.startswith(kind)} for kind in ("params", "balance")}  # fmt: skip
    state["balance"] = {name: x.at[..., 0].add(1e-3) for name, x in state["balance"].items()}
    with CheckpointStore(tmp_path / "run" / CHECKPOINTS, CheckpointConfig()) as store:
        store.save(4, state, {key: manifest.metadata[key] for key in ("phase", "config")})
    shutil.copy(folder / "run" / BASE, tmp_path / "run" / BASE)
    assert "trained its balancing biases (blocks.0" in refused(capsys, tmp_path / "run", tmp_path / "out")
    assert main(["import-hf", str(folder / "model"), "--output", str(tmp_path / "base")]) == 0
    both = refused(capsys, tmp_path / "run", tmp_path / "out", "--base", tmp_path / "base")
    assert "is not a transformers folder" in both
    assert "trained its balancing biases" in both
    assert both.count("Export") == both.count("Export without --peft.") == 1
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "out")]) == 0
