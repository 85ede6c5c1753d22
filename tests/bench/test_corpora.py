import json
from collections import Counter

import numpy as np
import pytest

from zaya_jax.bench.corpora import read_texts, repeat_lines, write_drawn, write_lines, write_tokenizer
from zaya_jax.config import DataConfig
from zaya_jax.data.prepare import open_manifest
from zaya_jax.data.shards import open_documents
from zaya_jax.data.tokenizer import load_tokenizer

TEXTS = [f"text {number} of a few words" for number in range(7)]


@pytest.fixture
def tokenizer(tmp_path):
    write_tokenizer(tmp_path / "tokenizer.json", TEXTS, 300)
    return tmp_path / "tokenizer.json"


def test_texts_are_those_of_the_train_split(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"file {number}")
    texts = read_texts(DataConfig(corpus=str(tmp_path), suffixes=(".txt",), heldout_fraction=0.3))
    assert 0 < len(texts) < 20
    assert set(texts) < {f"file {number}" for number in range(20)}


def test_lines_hold_each_text_about_equally_often_up_to_the_size(tmp_path):
    write_lines(tmp_path / "lines.jsonl", TEXTS, 1000)
    lines = (tmp_path / "lines.jsonl").read_bytes().splitlines(keepends=True)
    assert 1000 <= sum(map(len, lines)) < 1000 + len(lines[-1])
    counts = Counter(json.loads(line)["text"] for line in lines)
    assert set(counts) == set(TEXTS)
    assert max(counts.values()) - min(counts.values()) <= 1
    write_lines(tmp_path / "again.jsonl", TEXTS, 1000)
    assert (tmp_path / "again.jsonl").read_bytes() == (tmp_path / "lines.jsonl").read_bytes()


def test_lines_are_repeated(tmp_path):
    (tmp_path / "lines.jsonl").write_bytes(b"one\ntwo\n")
    repeat_lines(tmp_path / "more.jsonl", tmp_path / "lines.jsonl", 3)
    assert (tmp_path / "more.jsonl").read_bytes() == b"one\ntwo\n" * 3


def test_drawn_documents_are_a_prepared_folder(tmp_path, tokenizer):
    manifest = write_drawn(tmp_path / "drawn", tokenizer, 200_000, 2)
    assert manifest == open_manifest(tmp_path / "drawn")
    assert len(manifest.train.shards) == 2
    assert 200_000 <= manifest.train.tokens < 300_000
    assert manifest.heldout.documents == 2
    documents = open_documents(tmp_path / "drawn", manifest, "train")
    assert 500 < np.median(documents.lengths) < 900
    assert documents.lengths.mean() > 1.4 * np.median(documents.lengths)
    loaded = load_tokenizer(tokenizer)
    for index in range(20):
        tokens = documents[index].tokens
        assert tokens[0] == tokens[-1] == loaded.eot
        assert (tokens[1:-1] != loaded.eot).all()
        assert tokens.max() < loaded.vocab_size


def test_shards_differ(tmp_path, tokenizer):
    manifest = write_drawn(tmp_path / "drawn", tokenizer, 20_000, 2)
    assert len({shard.digest for shard in manifest.train.shards}) == 2
