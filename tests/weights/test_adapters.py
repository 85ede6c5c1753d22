import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.helpers import assert_close, random_model
from tests.train_helpers import MODEL
from tests.weights.adapter_helpers import write_adapter_run
from zaya_jax import load_model, save_pretrained
from zaya_jax.checkpoint.__main__ import main
from zaya_jax.model import tree
from zaya_jax.model.tree import roles
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.weights.load import BASE


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The folder of `write_adapter_run`, and the merged parameters of its steps 4 and 3."""
    folder = tmp_path_factory.mktemp("tuned")
    return folder, *write_adapter_run(folder)


def test_an_export_holds_the_merged_matrices(tuned, tmp_path):
    folder, expected, _ = tuned
    assert main(["export-hf", str(folder / "run"), str(tmp_path / "out"), "--dtype", "float32"]) == 0
    model = load_model(f"hf:{tmp_path / 'out'}")[0]
    values = {**tree.parameters(model), **tree.balancing_biases(model)}
    assert values.keys() == expected.keys()
    for name, x in expected.items():
        assert_close(values[name], x, 1e-6)
    before = tree.parameters(load_model(f"hf:{folder / 'model'}")[0])
    moved = {name for name in before if not np.array_equal(before[name], values[name])}
    assert moved == {name for name, role in roles(model).items() if role in ("attention", "expert")}


def test_adapters_have_no_average(tuned, tmp_path, capsys):
    folder, *_ = tuned
    steps = [str(folder / "run" / CHECKPOINTS / step) for step in ("3", "4")]
    assert main(["average", *steps, "--output", str(tmp_path / "mean")]) == 2
    assert "run/checkpoints/3 contains adapters, which have no average. Merge each of them" in capsys.readouterr().err
    assert not (tmp_path / "mean").exists()


def test_another_base_is_refused_and_the_right_one_can_be_named(tuned, tmp_path, capsys):
    folder, *_ = tuned
    save_pretrained(jax.device_get(random_model(MODEL, 7)), tmp_path / "other")
    command = ["export-hf", str(folder / "run"), str(tmp_path / "out"), "--base"]
    assert main([*command, f"hf:{tmp_path / 'other'}"]) == 2
    assert "other is not the base model of the adapters" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main([*command, f"hf:{folder / 'model'}"]) == 0


def test_adapters_without_a_note_of_their_base_are_refused(tuned, tmp_path, capsys):
    folder, *_ = tuned
    (folder / "run" / BASE).rename(tmp_path / "note")
    try:
        assert main(["export-hf", str(folder / "run"), str(tmp_path / "out")]) == 2
        assert "so the base model of the adapters" in capsys.readouterr().err
    finally:
        (tmp_path / "note").rename(folder / "run" / BASE)


def test_a_model_with_its_adapters_is_loaded_without_an_export(tuned):
    folder, expected, _ = tuned
    model, tokenizer = load_model(folder / "run")
    chex.assert_trees_all_equal({**tree.parameters(model), **tree.balancing_biases(model)}, expected)
    assert tokenizer.decode(tokenizer.encode("the model")) == "the model"
    assert load_model(folder / "run", jnp.bfloat16)[0].dtype == jnp.bfloat16
    assert load_model(folder / "run", None)[0].dtype == jnp.float32  # which the run computed in


def test_adapters_without_a_tokenizer_are_exported_with_that_of_their_base(tuned, tmp_path):
    folder, *_ = tuned
    shutil.copytree(folder / "run", tmp_path / "run", ignore=shutil.ignore_patterns("tokenizer"))
    for flags in ([], ["--peft"]):
        out = tmp_path / f"out{len(flags)}"
        assert main(["export-hf", str(tmp_path / "run"), str(out), *flags]) == 0
        assert (out / "tokenizer.json").read_text() == (folder / "model" / "tokenizer.json").read_text()
        assert (out / "generation_config.json").exists()
