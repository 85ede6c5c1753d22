"""Documents go in, shards come out: all of them, the same ones however the work is shared."""

import json
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.prepare_helpers import (
    QUARTER,
    check_nothing_else,
    check_same,
    contents,
    make_texts,
    read_back,
    write_input,
    write_jsonl,
    write_lines,
)
from zaya_jax.data.prepare.manifest import MANIFEST
from zaya_jax.data.prepare.preparation import PrepareSettings, merge, open_manifest, prepare
from zaya_jax.data.tokenizer import train_tokenizer

documents = st.lists(
    st.one_of(
        st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: text and not text.isspace()),
        st.sampled_from(["a", "one\ntwo\r\n", "<|endoftext|>", "a <|endoftext|> b", "☃" * 300, "\x00", "\ufeffx"]),
    ),
    min_size=1,
    max_size=25,
)


@given(texts=documents, unit_bytes=st.integers(40, 4000), escaped=st.booleans())
def test_every_document_comes_back(tmp_path_factory, tokenizer, texts, unit_bytes, escaped):
    folder = tmp_path_factory.mktemp("texts")
    lines = [json.dumps({"text": text}, ensure_ascii=escaped).encode() for text in texts]
    path = write_lines(folder / "in.jsonl", lines)
    manifest = prepare([str(path)], tokenizer, folder / "out", QUARTER, unit_bytes=unit_bytes, workers=1)
    assert manifest == open_manifest(folder / "out")
    check_same(texts, read_back(folder / "out"))
    check_nothing_else(folder / "out")
    assert manifest.counts == {}
    assert manifest.kind == "tokens"


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "saved dataset", "texts"])
def test_every_kind_of_input_gives_its_documents(tmp_path, tokenizer, kind):
    texts = make_texts(30)
    path = write_input(tmp_path, kind, texts)
    prepare([str(path)], tokenizer, tmp_path / "out", QUARTER, unit_bytes=500, workers=1)
    splits = read_back(tmp_path / "out")
    check_same(texts, splits)
    plain = write_jsonl(tmp_path / "other.jsonl", texts)
    prepare([str(plain)], tokenizer, tmp_path / "plain", QUARTER, workers=1)
    assert read_back(tmp_path / "plain") == splits  # held out are the same, whatever they were read from


def test_several_inputs_follow_one_another(tmp_path, tokenizer):
    texts = make_texts(40)
    first = write_jsonl(tmp_path / "z.jsonl", texts[:10])
    second = write_input(tmp_path, "parquet", texts[10:30])
    third = write_jsonl(tmp_path / "a.jsonl", texts[30:])
    inputs = [str(first), str(second), str(third)]
    prepare(inputs, tokenizer, tmp_path / "out", QUARTER, unit_bytes=300, workers=1)
    check_same(texts, read_back(tmp_path / "out"))


def test_another_field_and_other_endings_are_read_where_they_are_named(tmp_path, tokenizer):
    texts = make_texts(20)
    path = write_jsonl(tmp_path / "in.jsonl", texts, field="body")
    prepare([str(path)], tokenizer, tmp_path / "out", PrepareSettings(field="body", heldout=0.25), workers=1)
    check_same(texts, read_back(tmp_path / "out"))
    folder = write_input(tmp_path, "texts", texts)
    prepare([str(folder)], tokenizer, tmp_path / "logs", PrepareSettings(suffixes=(".log",), heldout=0), workers=1)
    assert read_back(tmp_path / "logs") == {"train": ["left out"] * 20, "heldout": []}


# --- which are held out ----------------------------------------------------------------------------------------


def test_held_out_is_a_part_of_the_documents_that_their_content_decides(tmp_path, tokenizer):
    texts = [f"text {i}" for i in range(2000)]
    first = write_jsonl(tmp_path / "one.jsonl", texts)
    reversed_file = write_jsonl(tmp_path / "other.jsonl", [*reversed(texts), "another"])
    settings = PrepareSettings(heldout=0.2)
    prepare([str(first)], tokenizer, tmp_path / "out", settings, workers=1)
    prepare([str(reversed_file)], tokenizer, tmp_path / "back", settings, workers=1, unit_bytes=20_000)
    splits, back = read_back(tmp_path / "out"), read_back(tmp_path / "back")
    assert len(splits["heldout"]) == pytest.approx(400, abs=4 * (2000 * 0.2 * 0.8) ** 0.5)
    assert set(splits["heldout"]) == set(back["heldout"]) - {"another"}
    prepare([str(first)], tokenizer, tmp_path / "more", PrepareSettings(heldout=0.4), workers=1)
    assert set(splits["heldout"]) < set(read_back(tmp_path / "more")["heldout"])


# --- what it does not depend on --------------------------------------------------------------------------------


def test_tasks_change_no_byte(tmp_path, tokenizer, texts_file):
    call = {"inputs": [str(texts_file)], "tokenizer": tokenizer, "settings": QUARTER, "unit_bytes": 900}
    prepare(output=tmp_path / "one", workers=1, **call)
    for task in (2, 0, 1):
        assert prepare(output=tmp_path / "tasks", workers=1, task=task, tasks=3, **call) is None
    assert not (tmp_path / "tasks" / MANIFEST).exists()
    manifest = merge(tmp_path / "tasks")
    assert len(manifest.train.shards) > 3
    assert contents(tmp_path / "one") == contents(tmp_path / "tasks")
    check_nothing_else(tmp_path / "one")


def test_more_tasks_than_units_leave_some_without_work(tmp_path, tokenizer, texts_file):
    for task in range(4):
        prepare([str(texts_file)], tokenizer, tmp_path / "out", QUARTER, workers=1, task=task, tasks=4)
    merge(tmp_path / "out")
    check_same(make_texts(40), read_back(tmp_path / "out"))


def test_a_tokenizer_of_another_file_is_not_remembered(tmp_path, tokenizer):
    path = write_jsonl(tmp_path / "in.jsonl", make_texts(20))
    train_tokenizer(["zzzz yyyy xxxx " * 20], 280).save(tmp_path / "other.json")
    for name in (tokenizer, tmp_path / "other.json"):
        prepare([str(path)], name, tmp_path / "out", QUARTER, workers=1)
        check_same(make_texts(20), read_back(tmp_path / "out"))
        for file in (tmp_path / "out").iterdir():
            file.unlink()


def test_ctrl_c_while_the_tokenizer_is_copied_leaves_nothing_behind(tmp_path, tokenizer, texts_file, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt):
            prepare([str(texts_file)], tokenizer, tmp_path / "out", QUARTER, workers=1)
    assert not list((tmp_path / "out").glob("*.partial"))
    prepare([str(texts_file)], tokenizer, tmp_path / "out", QUARTER, workers=1)
    check_nothing_else(tmp_path / "out")
