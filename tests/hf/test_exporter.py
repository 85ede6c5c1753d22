"""Folders written: shards and index, what is carried along, and that there is a whole folder or none."""

import errno
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.checkpoint.saved_helpers import bits
from tests.helpers import random_values, tiny_config
from zaya_jax.errors import InputError
from zaya_jax.hf.exporter import output_folder, read_arrays, write_folder
from zaya_jax.hf.folder import INDEX, open_folder

CONFIG = tiny_config("sliding")


@pytest.fixture(scope="module")
def values():
    return jax.device_get(random_values(CONFIG))


@pytest.mark.parametrize("layout", ["hf", "legacy"])
def test_shards_hold_the_same(layout, values, tmp_path):
    write_folder(tmp_path / "whole", CONFIG, read_arrays(values), "float32", layout)
    write_folder(tmp_path / "sharded", CONFIG, read_arrays(values), "float32", layout, max_shard_bytes=12_000)
    paths = sorted((tmp_path / "sharded").glob("*.safetensors"))
    assert len(paths) > 2
    assert paths[0].name == f"model-00001-of-{len(paths):05d}.safetensors"
    assert bits(tmp_path / "sharded") == bits(tmp_path / "whole")
    assert not (tmp_path / "whole" / INDEX).exists()
    index = json.loads((tmp_path / "sharded" / INDEX).read_text())
    assert index["weight_map"] == {name: path.name for path in paths for name in load_file(path)}
    assert index["metadata"]["total_size"] == sum(len(raw) for _, _, raw in bits(tmp_path / "whole").values())
    for path in paths:
        tensors = load_file(path)
        assert len(tensors) == 1 or sum(x.nbytes for x in tensors.values()) <= 12_000
    open_folder(tmp_path / "sharded")


def test_each_value_is_asked_for_once_and_one_at_a_time(values, tmp_path):
    """A layer's experts leave one by one, and come once."""
    calls = []

    def read(name, group):
        calls.append((name, group))
        return read_arrays(values)(name, group)

    write_folder(tmp_path / "model", CONFIG, read, "float32", "legacy")
    assert len(calls) == len(set(calls))


def test_values_are_cast_as_numpy_casts(values, tmp_path):
    write_folder(tmp_path / "model", CONFIG, read_arrays(values), jnp.bfloat16)
    low = {name: x if name.endswith("balancing_bias") else x.astype(jnp.bfloat16) for name, x in values.items()}
    write_folder(tmp_path / "cast_before", CONFIG, read_arrays(low), jnp.bfloat16)
    assert bits(tmp_path / "model") == bits(tmp_path / "cast_before")
    kinds = {kind for name, (kind, *_) in bits(tmp_path / "model").items() if "balancing" in name}
    assert kinds == {"float32"}


def test_what_a_dtype_cannot_hold_is_refused(values, tmp_path):
    large = {**values, "embedding": values["embedding"] * 1e6}
    write_folder(tmp_path / "fits", CONFIG, read_arrays(values), "float16")
    with pytest.raises(InputError, match=r"model\.embed_tokens\.weight has values beyond the range of float16"):
        write_folder(tmp_path / "model", CONFIG, read_arrays(large), "float16")
    for bad in (np.nan, np.inf):
        wrong = {**values, "embedding": np.where(values["embedding"] > 1, bad, values["embedding"])}
        with pytest.raises(InputError, match=r"model\.embed_tokens\.weight has NaN or infinite values"):
            write_folder(tmp_path / "model", CONFIG, read_arrays(wrong), "bfloat16")
    assert [path.name for path in tmp_path.iterdir()] == ["fits"]
    with pytest.raises(InputError, match="The dtype is int8, but"):
        write_folder(tmp_path / "model", CONFIG, read_arrays(values), "int8")


def test_tokenizer_and_special_tokens_are_carried_along(values, tmp_path):
    source = tmp_path / "source"
    (source / "tokenizer_extra").mkdir(parents=True)
    kept = ["tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json",
            "chat_template.jinja", "generation_config.json", "vocab.json", "merges.txt"]  # fmt: skip
    for name in [*kept, "model.safetensors", "README.md", "modeling_zaya.py"]:
        (source / name).write_text(name)
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "Mine"}')
    (source / "generation_config.json").write_text('{"eos_token_id": 9, "bos_token_id": 2}')
    (source / "config.json").write_text(json.dumps({"eos_token_id": [1, 106], "pad_token_id": 0, "hidden_size": 7}))
    (source / "linked.json").write_text("linked")
    (source / "added_tokens.json").symlink_to(source / "linked.json")  # as the hub's cache has its files
    write_folder(tmp_path / "model", CONFIG, read_arrays(values), "float32", carry=source)
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert names == {*kept, "added_tokens.json", "config.json", "model.safetensors"}
    assert (tmp_path / "model" / "tokenizer.json").read_text() == "tokenizer.json"
    assert not (tmp_path / "model" / "added_tokens.json").is_symlink()
    described = json.loads((tmp_path / "model" / "config.json").read_text())
    assert (described["eos_token_id"], described["pad_token_id"], described["hidden_size"]) == ([1, 106], 0, 24)
    assert described["bos_token_id"] == 2  # which stands in the generation file alone
    with pytest.raises(InputError, match="nowhere', but must be an existing folder"):
        write_folder(tmp_path / "other", CONFIG, read_arrays(values), "float32", carry=tmp_path / "nowhere")


def test_a_failure_leaves_no_folder_and_a_cut_off_one_is_taken_over(values, tmp_path):
    def failing(name, group):
        if name == "norm.weight":
            raise RuntimeError("the disk is gone")
        return read_arrays(values)(name, group)

    with pytest.raises(RuntimeError, match="the disk is gone"):
        write_folder(tmp_path / "model", CONFIG, failing, "float32")
    assert list(tmp_path.iterdir()) == []
    remains = tmp_path / "model.partial"
    remains.mkdir()
    (remains / "model-00001-of-00002.safetensors.partial").write_text("cut off")
    write_folder(tmp_path / "model", CONFIG, read_arrays(values), "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    remains.mkdir()
    (remains / "thesis.tex").write_text("mine")
    (tmp_path / "model").rename(tmp_path / "done")
    with pytest.raises(InputError, match="partial exists and was not left by an interrupted export"):
        write_folder(tmp_path / "model", CONFIG, read_arrays(values), "float32")
    assert (remains / "thesis.tex").read_text() == "mine"


def test_nothing_is_written_over(values, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for folder, said in ((tmp_path, "not an empty folder"), (tmp_path / "notes.txt", r"notes\.txt exists and is not")):
        with pytest.raises(InputError, match=said):
            write_folder(folder, CONFIG, read_arrays(values), "float32")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    write_folder(tmp_path / "empty", CONFIG, read_arrays(values), "float32")
    write_folder(tmp_path / "deep" / "er", CONFIG, read_arrays(values), "float32")
    assert bits(tmp_path / "empty") == bits(tmp_path / "deep" / "er")


@pytest.mark.parametrize("named", [True, False])
def test_an_export_that_the_system_refuses_names_the_folder_that_was_asked_for(tmp_path, named):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError) as refused, output_folder(tmp_path / "file" / "export", {}):
        pytest.fail("It went on.")
    assert refused.value.filename == str(tmp_path / "file" / "export")
    full = OSError(errno.ENOSPC, "No space left on device", *([str(tmp_path / "x.partial" / "a")] if named else []))
    with pytest.raises(OSError, match="No space left") as refused, output_folder(tmp_path / "x", {}):
        raise full
    assert refused.value.filename == str(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
