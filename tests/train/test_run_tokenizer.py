import json
import shutil

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.data_helpers import small_tokenizer, write_source
from tests.helpers import random_values
from tests.train_helpers import change, small_run
from zaya_jax.checkpoint.__main__ import main
from zaya_jax.config import SourceConfig
from zaya_jax.data.loading.sources import open_sources
from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.hf.exporter import read_arrays, write_folder
from zaya_jax.train.run_tokenizer import write_tokenizer
from zaya_jax.weights.load import open_weights

TALK = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "2"}]


def read(path):
    return json.loads(path.read_text())


def test_an_export_of_a_run_is_complete_without_carry(finished, tmp_path, capsys):
    config, result = finished
    assert main(["export-hf", config.run_dir, str(tmp_path / "out")]) == 0
    eot = result.prepared.tokenizer.eot
    assert read(tmp_path / "out" / "config.json")["eos_token_id"] == eot
    generation = read(tmp_path / "out" / "generation_config.json")
    assert generation == {"bos_token_id": eot, "eos_token_id": eot, "pad_token_id": eot}
    described = read(tmp_path / "out" / "tokenizer_config.json")
    assert (described["bos_token"], described["eos_token"]) == 2 * (result.prepared.tokenizer.eot_text,)
    text = "the model reads ☃"
    assert load_tokenizer(tmp_path / "out" / "tokenizer.json").encode(text) == result.prepared.tokenizer.encode(text)
    assert "--carry" not in capsys.readouterr().out

    # A run of an earlier version has no such folder until it resumes.
    old = tmp_path / "old"
    shutil.copytree(config.run_dir, old, ignore=shutil.ignore_patterns("tokenizer"))
    assert main(["export-hf", str(old), str(tmp_path / "bare")]) == 0
    assert "--carry FOLDER" in capsys.readouterr().out
    write_tokenizer(old, config, result.prepared)
    assert {path.name for path in (old / "tokenizer").iterdir()} == {
        "tokenizer.json", "tokenizer_config.json", "generation_config.json"}  # fmt: skip


@pytest.fixture
def chatting(tmp_path):
    """A configuration that reads conversations, and its sources."""
    write_source(tmp_path / "talk", [TALK] * 4, [TALK], kind="chat")
    config = change(small_run(tmp_path), {"data.sources": {"talk": SourceConfig(str(tmp_path / "talk"))}})
    (tmp_path / "run").mkdir()
    return config, open_sources(config)


def test_the_chat_template_is_the_one_of_training(chatting, tmp_path):
    config, prepared = chatting
    write_tokenizer(tmp_path / "run", config, prepared)
    path = tmp_path / "run" / "tokenizer" / "chat_template.jinja"
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    source = path.read_text().replace("{% generation %}", "").replace("{% endgeneration %}", "")
    text = environment.from_string(source).render(messages=TALK[:1], add_generation_prompt=True)
    assert text == "<|im_start|>user\n1?<|im_end|>\n<|im_start|>assistant\n"
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}")
    phase = change(config.phases[0], {"template": str(tmp_path / "own.jinja")})
    write_tokenizer(tmp_path / "run", change(config, {"phases": (phase,)}), prepared)
    assert path.read_text() == "{{ messages[0].content }}"


@pytest.mark.parametrize("same", [True, False])
def test_the_files_of_init_from_are_kept_if_its_tokenizer_is_the_datas(chatting, tmp_path, capsys, same):
    config, prepared = chatting
    origin = tmp_path / "model"
    origin.mkdir()
    small_tokenizer().save(origin / "tokenizer.json")
    if not same:
        (origin / "tokenizer.json").write_text((origin / "tokenizer.json").read_text() + "\n")
    (origin / "tokenizer_config.json").write_text(json.dumps({"eos_token": "mine", "chat_template": "old"}))
    (origin / "config.json").write_text(json.dumps({"eos_token_id": [7, 106]}))
    write_tokenizer(tmp_path / "run", change(config, {"init_from": f"hf:{origin}"}), prepared)
    said = capsys.readouterr().out
    assert said.startswith(f"Warning: init_from has another tokenizer.json, {origin}/tok") if not same else not said
    described = read(tmp_path / "run" / "tokenizer" / "tokenizer_config.json")
    assert ("mine" in described.values()) == same
    assert "chat_template" not in described
    stops = read(tmp_path / "run" / "tokenizer" / "generation_config.json")["eos_token_id"]
    assert stops == ([7, 106, prepared.tokenizer.eot] if same else prepared.tokenizer.eot)
    (origin / "tokenizer.json").unlink()  # a later start writes nothing anew
    write_tokenizer(tmp_path / "run", change(config, {"init_from": f"hf:{origin}"}), prepared)
    assert read(tmp_path / "run" / "tokenizer" / "tokenizer_config.json") == described


def test_the_tokenizer_is_that_of_the_open_weights(chatting, tmp_path):
    """They are not looked for again, so that a folder replaced meanwhile brings no other tokenizer."""
    config, prepared = chatting
    write_folder(tmp_path / "model", config.model, read_arrays(random_values(config.model)), "float32")
    small_tokenizer().save(tmp_path / "model" / "tokenizer.json")
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "mine"}))
    weights = open_weights(f"hf:{tmp_path / 'model'}")
    write_tokenizer(tmp_path / "run", change(config, {"init_from": f"hf:{tmp_path / 'other'}"}), prepared, weights)
    assert "mine" in read(tmp_path / "run" / "tokenizer" / "tokenizer_config.json").values()


def test_a_folder_that_cannot_be_written_is_a_warning(chatting, tmp_path, capsys):
    config, prepared = chatting
    (tmp_path / "run" / "tokenizer").write_text("in the way")
    write_tokenizer(tmp_path / "run", config, prepared)
    output = capsys.readouterr().out
    assert output.startswith("Warning: the tokenizer could not be written")
    assert "Not a directory" in output
