"""Exports have every tokenizer file that `transformers` needs, whatever their source has."""

import json

import jax
import pytest

from tests.data_helpers import small_tokenizer
from tests.helpers import random_values, tiny_config
from zaya_jax.errors import InputError
from zaya_jax.hf.exporter import read_arrays, write_folder
from zaya_jax.hf.tokenizer_files import complete_tokenizer_files
from zaya_jax.run.tokenizer import copy_tokenizer

IDS = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # of `small_tokenizer`


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source").mkdir()
    small_tokenizer().save(tmp_path / "source" / "tokenizer.json")
    return tmp_path / "source"


def put(folder, name, content):
    (folder / name).write_text(json.dumps(content))


def read(files, name):
    return json.loads(files[name])


def test_a_bare_tokenizer_is_completed(source, tmp_path):
    config = tiny_config()
    write_folder(tmp_path / "out", config, read_arrays(jax.device_get(random_values(config))), "bfloat16", carry=source)
    written = {path.name: json.loads(path.read_text()) for path in (tmp_path / "out").glob("*.json")}
    assert written["generation_config.json"] == IDS
    assert {key: written["config.json"][key] for key in IDS} == IDS
    settings = written["tokenizer_config.json"]
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert {settings[key] for key in ("bos_token", "eos_token", "pad_token")} == {"<|endoftext|>"}


def test_without_a_tokenizer_the_ids_are_null_and_not_those_of_gemma(tmp_path):
    config = tiny_config()
    write_folder(tmp_path / "out", config, read_arrays(jax.device_get(random_values(config))), "bfloat16")
    tree = json.loads((tmp_path / "out" / "config.json").read_text())
    assert {key: tree[key] for key in IDS} == dict.fromkeys(IDS)
    assert not (tmp_path / "out" / "generation_config.json").exists()


def test_values_that_are_present_stay(source):
    put(source, "tokenizer_config.json", {"tokenizer_class": "Mine", "bos_token": None, "pad_token": "a", "extra": 1})
    put(source, "generation_config.json", {"temperature": 0.6, "eos_token_id": [7], "pad_token_id": None})
    files, ids = complete_tokenizer_files(source)
    assert ids == {"bos_token_id": None, "eos_token_id": [7], "pad_token_id": None}
    assert files["tokenizer_config.json"] == source / "tokenizer_config.json"  # nothing was missing
    assert files["generation_config.json"] == source / "generation_config.json"
    put(source, "config.json", {"pad_token_id": 3, "eos_token_id": 8})
    files, ids = complete_tokenizer_files(source)
    assert ids == {"bos_token_id": None, "eos_token_id": 8, "pad_token_id": 3}
    assert read(files, "generation_config.json") == {"temperature": 0.6, "eos_token_id": [7], "pad_token_id": 3}


def test_a_class_is_added_and_the_tokens_of_a_special_tokens_map_are_left_to_it(source):
    put(source, "config.json", {"eos_token_id": 9})
    put(source, "tokenizer_config.json", {"pad_token": {"content": "a"}, "extra": 1})
    files, ids = complete_tokenizer_files(source)
    settings = read(files, "tokenizer_config.json")
    assert (settings["tokenizer_class"], settings["extra"]) == ("PreTrainedTokenizerFast", 1)
    assert (settings["eos_token"], settings["pad_token"]) == ("<|endoftext|>", {"content": "a"})
    assert ids == {"bos_token_id": 0, "eos_token_id": 9, "pad_token_id": small_tokenizer().token_id("a")}
    put(source, "special_tokens_map.json", {"eos_token": "a"})
    assert "eos_token" not in read(complete_tokenizer_files(source)[0], "tokenizer_config.json")


def test_a_tokenizer_that_does_not_tell_its_end_is_refused(source):
    path = source / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<|fin|>"))
    with pytest.raises(InputError, match=r"tokenizer\.json has none of .* eos_token of a tokenizer_config\.json"):
        complete_tokenizer_files(source)
    put(source, "tokenizer_config.json", {"eos_token": "<|fin|>"})
    assert complete_tokenizer_files(source)[1]["eos_token_id"] == 0


def test_an_import_keeps_the_ids_of_either_file(source, tmp_path):
    put(source, "config.json", {"eos_token_id": 106, "pad_token_id": 0})
    put(source, "generation_config.json", {"temperature": 0.6, "eos_token_id": [1, 106]})
    copy_tokenizer(source, tmp_path / "run")
    kept = json.loads((tmp_path / "run" / "tokenizer" / "generation_config.json").read_text())
    assert kept == {"temperature": 0.6, "eos_token_id": [1, 106], "pad_token_id": 0}
