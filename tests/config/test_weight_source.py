"""The form of a source of weights."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.config.weight_source import WeightSource, parse_source


@given(path=st.text(max_size=9))
def test_one_prefix_is_taken_off_and_nothing_else(path):
    assert parse_source(f"hf:{path}") == WeightSource("transformers", path)
    if not path.startswith("hf:"):
        assert parse_source(path) == WeightSource("checkpoint", path)


@pytest.mark.parametrize("text", ["runs/a", "runs/a@long", "runs/a/checkpoints/5", "~/hf:model", "HF:model", " hf:x"])
def test_what_has_no_prefix_is_a_checkpoint_as_it_was_typed(text):
    assert parse_source(text) == WeightSource("checkpoint", text)


def test_a_folder_that_exists_is_no_prefix_and_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_source("hf:a") == WeightSource("transformers", "a")
    (tmp_path / "hf:a").mkdir()
    assert parse_source("hf:a") == WeightSource("checkpoint", "hf:a")
    assert parse_source("hf:hf:a") == WeightSource("transformers", "hf:a")
