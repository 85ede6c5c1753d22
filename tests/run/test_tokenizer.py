import json

import pytest

from zaya_jax.errors import InputError
from zaya_jax.run.tokenizer import copy_tokenizer, run_tokenizer, special_ids


def test_files_and_ids_are_copied_into_a_run_and_nothing_where_there_are_none(tmp_path):
    source, run = tmp_path / "source", tmp_path / "run"
    source.mkdir()
    checkpoint = run / "checkpoints" / "0"
    (source / "model.safetensors").write_text("weights")
    copy_tokenizer(source, run)
    assert run_tokenizer(checkpoint) is None
    (source / "tokenizer.json").write_text("tokens")
    (source / "config.json").write_text('{"eos_token_id": [1, 2], "hidden_size": 3}')
    copy_tokenizer(source, run)
    folder = run_tokenizer(checkpoint)
    assert folder is not None
    assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "generation_config.json"}
    assert special_ids(folder) == {"eos_token_id": [1, 2]}


def test_ids_of_the_configuration_come_before_those_of_generation(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1, "bos_token_id": 2, "top_k": 3}))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 4}))
    assert special_ids(tmp_path) == {"eos_token_id": 4, "bos_token_id": 2}
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(InputError, match=r"config\.json holds no JSON object"):
        special_ids(tmp_path)
