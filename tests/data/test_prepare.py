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

import pytest

from zaya_jax.data import prepare as module
from zaya_jax.data.prepare import prepare
from zaya_jax.errors import InputError


@pytest.fixture
def config(tmp_path, make_config, write_corpus):
    return make_config(write_corpus(tmp_path / "corpus"), tmp_path / "cache")


def names(config):
    return sorted(path.name for path in Path(config.data.cache_dir).iterdir())


def test_the_sizes_are_those_of_the_texts(config, tmp_path):
    prepared = prepare(config)
    texts = {path.relative_to(tmp_path / "corpus").as_posix(): path.read_bytes().decode()
             for path in (tmp_path / "corpus").rglob("*.txt")}  # fmt: skip
    decoded = []
    for split in ("train", "heldout"):
        documents = prepared.open(split)
        split_texts = [prepared.tokenizer.decode(document[1:-1]) for document in documents]
        entry = prepared.manifest.split(split)
        assert entry.documents == len(documents) == len(split_texts)
        assert entry.tokens == documents.lengths.sum()
        assert entry.text_bytes == sum(len(text.encode()) for text in split_texts)
        decoded += split_texts
    assert sorted(decoded) == sorted(texts.values())
    assert set(prepared.baselines) == {"gzip", "xz", "gzip_given_train", "xz_given_train"}
    assert 0 < prepared.baselines["xz_given_train"] < prepared.baselines["xz"]


def test_the_tokenizer_sees_the_train_split_alone(config, tmp_path):
    prepared = prepare(config)
    vocabulary = prepared.tokenizer._backend.get_vocab()
    for path in (tmp_path / "corpus").rglob("*.txt"):
        path.write_text(path.read_text() + "zq" * 50)
    assert "zq" not in vocabulary
    corpus = module.find_corpus(config.data)
    for file in corpus.train:
        (corpus.root / file).write_text("other")
    assert "zq" not in prepare(config).tokenizer._backend.get_vocab()


def test_a_second_call_finds_the_folder(config, monkeypatch, capfd):
    first = prepare(config)
    assert "training a tokenizer of 300 tokens" in capfd.readouterr().err
    monkeypatch.setattr(module, "_prepare", None)
    second = prepare(config)
    assert (second.folder, second.manifest, second.baselines) == (first.folder, first.manifest, first.baselines)
    assert capfd.readouterr() == ("", "")


def test_two_preparations_give_the_same_files(config, tmp_path):
    first = prepare(config)
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, cache_dir=str(tmp_path / "other")))
    second = prepare(other)
    assert first.digest == second.digest
    for path in first.folder.iterdir():
        assert path.read_bytes() == (second.folder / path.name).read_bytes()


@pytest.mark.parametrize("change", [{"vocab_size": 301}, {"heldout_fraction": 0.31}, {"suffixes": (".txt", ".md")}])
def test_other_settings_have_a_folder_of_their_own(config, tmp_path, make_config, change):
    other = make_config(tmp_path / "corpus", tmp_path / "cache", **change)
    assert prepare(other).folder != prepare(config).folder


def test_other_text_has_a_folder_of_its_own(config, tmp_path):
    before = prepare(config).folder
    next((tmp_path / "corpus").rglob("*.txt")).write_text("new")
    assert prepare(config).folder != before


@pytest.mark.parametrize("stage", ["train_tokenizer", "write_split", "compressor_baselines", "write_manifest"])
def test_an_interrupted_preparation_leaves_nothing(config, monkeypatch, stage):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(module, stage, interrupt)
        with pytest.raises(KeyboardInterrupt):
            prepare(config)
    assert [name for name in names(config) if not name.endswith(".lock")] == []
    assert prepare(config).folder.name in names(config)


def test_a_killed_preparation_is_replaced(config, tmp_path):
    code = (
        "import sys, pickle, time; from zaya_jax.data import prepare as m;"
        "m.compressor_baselines = lambda *_: print('here', flush=True) or time.sleep(60);"
        "m.prepare(pickle.loads(sys.stdin.buffer.read()))"
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
    prepared = prepare(config)
    assert names(config) == [prepared.digest, f"{prepared.digest}.lock"]
    assert not (prepared.folder / "junk").exists()


def test_of_several_at_once_one_prepares(config, monkeypatch):
    calls, real = [], module._prepare

    def slow(*arguments):
        calls.append(arguments)
        time.sleep(0.2)
        real(*arguments)

    monkeypatch.setattr(module, "_prepare", slow)
    with ThreadPoolExecutor(4) as threads:
        prepared = list(threads.map(prepare, [config] * 4))
    assert len(calls) == 1
    assert len({p.folder for p in prepared}) == 1


def test_a_corpus_that_changes_meanwhile_is_refused(config, tmp_path, monkeypatch):
    def change(*_):
        next((tmp_path / "corpus").rglob("*.txt")).write_text("new")
        return {}

    monkeypatch.setattr(module, "compressor_baselines", change)
    with pytest.raises(InputError, match=re.escape(f"A file in {tmp_path / 'corpus'} changed")):
        prepare(config)


def test_a_damaged_folder_is_named_and_prepared_anew_once_deleted(config):
    folder = prepare(config).folder
    (folder / "train-00000.arrayrecord").unlink()
    with pytest.raises(InputError, match=f"Delete the folder {re.escape(str(folder))}"):
        prepare(config)
    shutil.rmtree(folder)
    assert prepare(config).folder == folder


def test_too_small_a_vocabulary_is_named(tmp_path, make_config, config):
    with pytest.raises(InputError, match=r"model\.vocab_size is 200"):
        prepare(make_config(config.data.corpus, tmp_path / "cache", vocab_size=200))
    assert [name for name in names(config) if not name.endswith(".lock")] == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path, make_config, config):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=re.escape(f"data.cache_dir ({tmp_path / 'file'}) cannot be written")):
        prepare(make_config(config.data.corpus, tmp_path / "file"))


def test_jax_stays_unimported(config):
    code = (
        "import sys, pickle; from zaya_jax.data.pipeline import prepare, heldout_batches;"
        "config = pickle.loads(sys.stdin.buffer.read()); list(heldout_batches(config, prepare(config)));"
        "assert not {'jax', 'grain'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], input=pickle.dumps(config), check=True)
