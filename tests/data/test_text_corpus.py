import dataclasses
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.data import text_corpus as module
from zaya_jax.data.corpus import SPLITS
from zaya_jax.data.manifest import FORMAT, MANIFEST, FileEntry, Manifest, SplitEntry, describe_file, read_manifest
from zaya_jax.data.shards import open_documents, token_dtype
from zaya_jax.data.text_corpus import open_corpus, read_baselines, write_split
from zaya_jax.data.tokenizer import load_tokenizer, train_tokenizer
from zaya_jax.errors import InputError


@pytest.fixture
def config(tmp_path, make_config, write_corpus):
    return make_config(write_corpus(tmp_path / "corpus"), tmp_path / "cache")


def names(config):
    return sorted(path.name for path in Path(config.data.cache_dir).iterdir())


def folder_of(config):
    return open_corpus(config)[0]


def vocabulary(folder):
    return load_tokenizer(folder / "tokenizer.json")._backend.get_vocab()


def test_the_sizes_are_those_of_the_texts(config, tmp_path):
    folder, manifest = open_corpus(config)
    tokenizer = load_tokenizer(folder / manifest.tokenizer.file, manifest.eot)
    texts = {path.relative_to(tmp_path / "corpus").as_posix(): path.read_bytes().decode()
             for path in (tmp_path / "corpus").rglob("*.txt")}  # fmt: skip
    decoded = []
    for split in SPLITS:
        documents = open_documents(folder, manifest, split)
        split_texts = [tokenizer.decode(document.tokens[1:-1]) for document in documents]
        assert all(document.tokens[[0, -1]].tolist() == [tokenizer.eot] * 2 for document in documents)
        entry = manifest.split(split)
        assert entry.documents == len(documents) == len(split_texts)
        assert entry.tokens == documents.lengths.sum()
        assert entry.text_bytes == sum(len(text.encode()) for text in split_texts)
        decoded += split_texts
    assert sorted(decoded) == sorted(texts.values())
    baselines = read_baselines(folder)
    assert set(baselines) == {"gzip", "xz", "gzip_given_train", "xz_given_train"}
    assert 0 < baselines["xz_given_train"] < baselines["xz"]


def test_the_manifest_names_every_file_and_what_they_are_of(config):
    folder, manifest = open_corpus(config)
    assert manifest == read_manifest(folder, "")
    assert {entry.file for entry in manifest.files()} | {MANIFEST} == {path.name for path in folder.iterdir()}
    assert all(entry.digest == describe_file(folder / entry.file).digest for entry in manifest.files())
    assert (manifest.kind, manifest.dtype, manifest.eot) == ("tokens", "<u2", "<|endoftext|>")
    assert manifest.content == folder.name
    assert (manifest.counts, manifest.examples) == ({}, ())


def test_the_tokenizer_sees_the_train_split_alone(config, tmp_path):
    before = vocabulary(folder_of(config))
    for path in (tmp_path / "corpus").rglob("*.txt"):
        path.write_text(path.read_text() + "zq" * 50)
    assert "zq" not in before
    assert "zq" in vocabulary(folder_of(config))
    corpus = module.find_corpus(config.data)
    for file in corpus.train:
        (corpus.root / file).write_text("other")
    assert "zq" not in vocabulary(folder_of(config))


def test_a_second_call_finds_the_folder(config, monkeypatch, capfd):
    first = open_corpus(config)
    assert "training a tokenizer of 300 tokens" in capfd.readouterr().err
    monkeypatch.setattr(module, "_prepare", None)
    assert open_corpus(config) == first
    assert capfd.readouterr() == ("", "")


def test_two_preparations_give_the_same_files(config, tmp_path):
    first = folder_of(config)
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, cache_dir=str(tmp_path / "other")))
    second = folder_of(other)
    assert first.name == second.name
    assert sorted(path.name for path in first.iterdir()) == sorted(path.name for path in second.iterdir())
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


@pytest.mark.parametrize("change", [{"vocab_size": 301}, {"heldout_fraction": 0.31}, {"suffixes": (".txt", ".md")}])
def test_other_settings_have_a_folder_of_their_own(config, tmp_path, make_config, change):
    other = make_config(tmp_path / "corpus", tmp_path / "cache", **change)
    assert folder_of(other) != folder_of(config)


def test_other_text_has_a_folder_of_its_own(config, tmp_path):
    before = folder_of(config)
    next((tmp_path / "corpus").rglob("*.txt")).write_text("new")
    assert folder_of(config) != before


@pytest.mark.parametrize("stage", ["train_tokenizer", "write_split", "compressor_baselines", "write_manifest"])
def test_an_interrupted_preparation_leaves_nothing(config, monkeypatch, stage):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, stage, interrupt)
        with pytest.raises(KeyboardInterrupt):
            open_corpus(config)
    assert [name for name in names(config) if not name.endswith(".lock")] == []
    assert folder_of(config).name in names(config)


def test_a_killed_preparation_is_replaced(config, tmp_path):
    code = (
        "import sys, pickle, time; from zaya_jax.data import text_corpus as m;"
        "m.compressor_baselines = lambda *_: print('here', flush=True) or time.sleep(60);"
        "m.open_corpus(pickle.loads(sys.stdin.buffer.read()))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    with process:
        process.stdin.write(pickle.dumps(config))
        process.stdin.close()
        assert process.stdout.readline() == b"here\n"
        process.send_signal(signal.SIGKILL)
    (left,) = (name for name in names(config) if name.endswith(".partial"))
    (tmp_path / "cache" / left / "junk").touch()
    folder, manifest = open_corpus(config)
    assert names(config) == [manifest.content, f"{manifest.content}.lock"]
    assert not (folder / "junk").exists()


def test_of_several_at_once_one_prepares(config, monkeypatch):
    calls, real = [], module._prepare

    def slow(*arguments):
        calls.append(arguments)
        time.sleep(0.2)
        real(*arguments)

    monkeypatch.setattr(module, "_prepare", slow)
    with ThreadPoolExecutor(4) as threads:
        folders = set(threads.map(folder_of, [config] * 4))
    assert len(calls) == 1
    assert len(folders) == 1


def test_a_corpus_that_changes_meanwhile_is_refused(config, tmp_path, monkeypatch):
    def change(*_):
        next((tmp_path / "corpus").rglob("*.txt")).write_text("new")
        return {}

    monkeypatch.setattr(module, "compressor_baselines", change)
    with pytest.raises(InputError, match=re.escape(f"A file in {tmp_path / 'corpus'} changed")):
        open_corpus(config)


def test_a_damaged_folder_is_named_and_prepared_anew_once_deleted(config):
    folder = folder_of(config)
    (folder / "train-000000.arrayrecord").unlink()
    with pytest.raises(InputError, match=f"Delete the folder {re.escape(str(folder))}"):
        open_corpus(config)
    shutil.rmtree(folder)
    assert folder_of(config) == folder


def test_too_small_a_vocabulary_is_named(tmp_path, make_config, config):
    with pytest.raises(InputError, match=r"model\.vocab_size is 200"):
        open_corpus(make_config(config.data.corpus, tmp_path / "cache", vocab_size=200))
    assert [name for name in names(config) if not name.endswith(".lock")] == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path, make_config, config):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=re.escape(f"data.cache_dir ({tmp_path / 'file'})")):
        open_corpus(make_config(config.data.corpus, tmp_path / "file"))


def test_jax_stays_unimported(config):
    code = (
        "import sys, pickle; from zaya_jax.data.text_corpus import open_corpus;"
        "open_corpus(pickle.loads(sys.stdin.buffer.read()));"
        "assert not {'jax', 'grain'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], input=pickle.dumps(config), check=True)


# --- documents to shards ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(["some words and more of them"] * 20, 300)


def split_of(folder, tokenizer, entry, split):
    """The documents of a split that `write_split` wrote."""
    unused = SplitEntry((), FileEntry("", 0, ""), 0, 0, 0)
    splits = {"train": unused, "heldout": unused, split: entry}
    manifest = Manifest(FORMAT, "tokens", "", "", token_dtype(tokenizer.vocab_size).str, FileEntry("", 0, ""),
                        tokenizer.eot_text, counts={}, examples=(), **splits)  # fmt: skip
    return open_documents(folder, manifest, split)


@given(
    documents=st.lists(st.lists(st.integers(1, 256), max_size=30), min_size=1, max_size=12),
    split=st.sampled_from(SPLITS),
    shard_bytes=st.sampled_from([1, 50, 1000]),
)
def test_documents_come_back_between_ends(tmp_path_factory, tokenizer, documents, split, shard_bytes):
    folder = tmp_path_factory.mktemp("shards")
    entry = write_split(folder, split, iter(documents), tokenizer, 7, shard_bytes=shard_bytes)
    read = split_of(folder, tokenizer, entry, split)
    assert [read[i].tokens.tolist() for i in range(len(read))] == [[0, *document, 0] for document in documents]
    assert all(read[i].counts is None for i in range(len(read)))
    assert read.lengths.tolist() == [len(document) + 2 for document in documents]
    assert read.lengths.dtype == np.int64
    assert entry.documents == len(documents) == sum(shard.documents for shard in entry.shards)
    assert entry.tokens == sum(read.lengths)
    assert entry.text_bytes == 7
    assert [shard.file for shard in entry.shards] == [f"{split}-{i:06d}.arrayrecord" for i in range(len(entry.shards))]
    assert shard_bytes != 1 or len(entry.shards) == len(documents)
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [entry.lengths.file, *(shard.file for shard in entry.shards)]
    )


def test_no_document_is_no_shard(tmp_path, tokenizer):
    entry = write_split(tmp_path, "heldout", [], tokenizer, 0)
    assert (entry.shards, entry.documents, entry.tokens) == ((), 0, 0)
    assert len(split_of(tmp_path, tokenizer, entry, "heldout")) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["heldout-lengths.npy"]


def test_shards_are_little_endian_records_of_their_own(tmp_path, tokenizer):
    write_split(tmp_path, "heldout", [[258, 1], [2]], tokenizer, 3)
    reader = ArrayRecordReader(str(tmp_path / "heldout-000000.arrayrecord"))
    assert reader.read_all() == [bytes([0, 0, 2, 1, 1, 0, 0, 0]), bytes([0, 0, 2, 0, 0, 0])]
    assert "group_size:1," in reader.writer_options_string()
    reader.close()


def test_a_full_shard_is_followed_by_a_new_one(tmp_path, tokenizer):
    entry = write_split(tmp_path, "train", [[1] * 8] * 5, tokenizer, 0, shard_bytes=40)
    assert [shard.documents for shard in entry.shards] == [2, 2, 1]


def test_the_same_documents_give_the_same_bytes(tmp_path, tokenizer):
    entries = []
    for name in "ab":
        (tmp_path / name).mkdir()
        entries.append(write_split(tmp_path / name, "train", [[1, 2]] * 9, tokenizer, 0))
    assert entries[0] == entries[1]
