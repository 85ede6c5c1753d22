"""The form of a source of weights."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.config.weight_source import hf_folder


@given(path=st.text(max_size=9))
def test_one_prefix_is_taken_off_and_nothing_else(path):
    assert hf_folder(f"hf:{path}") == path
    if not path.startswith("hf:"):
        assert hf_folder(path) is None


@pytest.mark.parametrize("text", ["runs/a", "runs/a@long", "runs/a/checkpoints/5", "~/hf:model", "HF:model", " hf:x"])
def test_what_has_no_prefix_is_a_checkpoint(text):
    assert hf_folder(text) is None


def test_a_folder_that_exists_is_no_prefix_and_another_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert hf_folder("hf:a") == "a"
    (tmp_path / "hf:a").mkdir()
    assert hf_folder("hf:a") is None
    assert hf_folder("hf:hf:a") == "hf:a"
