import dataclasses
import pickle
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.data.loading import text_corpus as module
from zaya_jax.data.loading.text_corpus import BASELINES, corpus_baselines, open_corpus
from zaya_jax.data.prepare.manifest import MANIFEST, SPLITS, describe_file, read_manifest
from zaya_jax.data.prepare.shards import open_documents
from zaya_jax.data.tokenizer import load_tokenizer
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
        assert manifest.split(split).text_bytes == sum(len(text.encode()) for text in split_texts)
        decoded += split_texts
    assert sorted(decoded) == sorted(texts.values())
    baselines = corpus_baselines(config, folder)
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


def test_two_preparations_give_the_same_files(config, tmp_path):
    first = folder_of(config)
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, cache_dir=str(tmp_path / "other")))
    second = folder_of(other)
    assert first.name == second.name
    assert sorted(path.name for path in first.iterdir()) == sorted(path.name for path in second.iterdir())
    for path in first.iterdir():
        assert path.read_bytes() == (second / path.name).read_bytes()


@pytest.mark.parametrize("change", [{"vocab_size": 301}, {"heldout_fraction": 0.31}, {"suffixes": (".txt", ".md")}])
def test_other_settings_and_other_text_have_a_folder_of_their_own(config, tmp_path, make_config, change):
    other = make_config(tmp_path / "corpus", tmp_path / "cache", **change)
    folders = {folder_of(other), folder_of(config)}
    next((tmp_path / "corpus").rglob("*.txt")).write_text("new")
    assert len(folders | {folder_of(config)}) == 3


@pytest.mark.parametrize("stage", ["train_tokenizer", "Conversion", "write_merged"])
def test_an_interrupted_preparation_leaves_nothing(config, monkeypatch, stage):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, stage, interrupt)
        with pytest.raises(KeyboardInterrupt):
            open_corpus(config)
    assert [name for name in names(config) if not name.endswith(".lock")] == []
    assert folder_of(config).name in names(config)


def test_baselines_are_measured_once_and_only_of_the_prepared_text(config, tmp_path, monkeypatch, capsys):
    folder, _ = open_corpus(config)
    assert not (folder / BASELINES).exists()
    first = corpus_baselines(config, folder)
    monkeypatch.setattr(module, "compressor_baselines", None)
    assert corpus_baselines(config, folder) == first
    (folder / BASELINES).unlink()
    monkeypatch.setattr(module, "compressor_baselines", lambda *_: (_ for _ in ()).throw(OSError("no space")))
    assert corpus_baselines(config, folder) == {}
    assert "gzip and xz were not measured: no space" in capsys.readouterr().err
    next((tmp_path / "corpus").rglob("*.txt")).write_text("new")
    assert corpus_baselines(config, folder) == {}
    assert not (folder / BASELINES).exists()


def test_a_killed_preparation_is_replaced(config, tmp_path):
    code = (
        "import sys, pickle, time; from zaya_jax.data.loading import text_corpus as m;"
        "m.write_merged = lambda *_, **__: print('here', flush=True) or time.sleep(60);"
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
    real = module.Conversion

    def change(*arguments):
        next((tmp_path / "corpus").rglob("*.txt")).write_text("new")
        return real(*arguments)

    monkeypatch.setattr(module, "Conversion", change)
    with pytest.raises(InputError, match=re.escape(f"A file in {tmp_path / 'corpus'} changed")):
        open_corpus(config)


@given(
    texts=st.lists(st.text(min_size=1, max_size=40).filter(str.strip), min_size=2, max_size=9, unique=True),
    others=st.lists(st.sampled_from([".hidden.txt", "a.md", "b.md", "blank.txt", "folder/c"]), unique=True),
    unit_bytes=st.sampled_from([1, 50, 1000]),
)
def test_texts_come_back_in_the_order_of_files_and_other_files_are_counted(
    tmp_path_factory, make_config, texts, others, unit_bytes
):
    root = tmp_path_factory.mktemp("texts")
    (root / "corpus" / "folder").mkdir(parents=True)
    contents = {f"{number}.txt": text.encode() for number, text in enumerate(texts)}
    for name, content in (contents | dict.fromkeys(others, b" \n")).items():
        (root / "corpus" / name).write_bytes(content)
    config = make_config(root / "corpus", root / "cache", vocab_size=257)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_UNIT_BYTES", unit_bytes)
        folder, manifest = open_corpus(config)
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    corpus = module.find_corpus(config.data)
    assert sorted(corpus.train + corpus.heldout) == sorted(contents)
    for split in SPLITS:
        entry, files = manifest.split(split), corpus.files(split)
        decoded = [tokenizer.decode(document.tokens[1:-1]) for document in open_documents(folder, manifest, split)]
        assert decoded == [contents[file].decode() for file in files]
        assert entry.text_bytes == sum(len(contents[file]) for file in files)
        assert unit_bytes > 1 or {shard.documents for shard in entry.shards} == {1}
    assert manifest.unread_files == {
        kind: count
        for kind, count in (
            ("hidden", ".hidden.txt" in others),
            (".md", ("a.md" in others) + ("b.md" in others)),
            ("empty", "blank.txt" in others),
            ("without suffix", "folder/c" in others),
        )
        if count
    }
