import dataclasses
import json
import pickle
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zaya_jax.config import PhaseConfig, SourceConfig, Table
from zaya_jax.data.loading import text_corpus
from zaya_jax.data.loading.sources import open_sources
from zaya_jax.data.prepare import manifest
from zaya_jax.data.prepare.preparation import PrepareSettings, prepare
from zaya_jax.data.tokenizer import train_tokenizer
from zaya_jax.errors import InputError


@pytest.fixture
def config(tmp_path, make_config, write_corpus):
    return make_config(write_corpus(tmp_path / "corpus"), tmp_path / "cache")


def with_sources(config, **sources):
    data = dataclasses.replace(config.data, sources=Table({name: SourceConfig(str(s)) for name, s in sources.items()}))
    return dataclasses.replace(config, data=data)


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory):
    """Files of two tokenizers, `a` and `b`."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name in "ab":
        train_tokenizer([f"words of {name} and more words of it"] * 20, 280).save(folder / f"{name}.json")
    return {name: folder / f"{name}.json" for name in "ab"}


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def make_source(folder, texts, tokenizer, **settings):
    """A prepared folder of `texts`."""
    folder.mkdir(parents=True)
    lines = write_lines(folder / "lines.jsonl", texts)
    prepare([lines], tokenizer, folder / "out", PrepareSettings(**{"heldout": 0.3, **settings}), workers=1)
    return folder / "out"


@pytest.fixture(scope="session")
def made(tmp_path_factory, tokenizers):
    """Two prepared folders, of one tokenizer; copied before they are altered."""
    root = tmp_path_factory.mktemp("sources")
    return {
        name: make_source(root / name, [f"{name} {i} ☃" for i in range(20)], tokenizers["a"]) for name in ("x", "y")
    }


def test_sources_whose_documents_begin_otherwise_are_refused(tmp_path, config, tokenizers, made):
    other = make_source(tmp_path / "other", ["some text"] * 3, tokenizers["a"], heldout=0, bos="a")
    with pytest.raises(
        InputError, match=r"data\.sources\.z begin with 'a', .* data\.sources\.x begin with '<\|endof.*--bos"
    ):
        open_sources(with_sources(config, x=made["x"], z=other))
    none = make_source(tmp_path / "none", ["some text"] * 3, tokenizers["a"], heldout=0, bos="none")
    assert open_sources(with_sources(config, x=made["x"], z=none)).tokenizer.prefix == [0]


# --- the corpus ------------------------------------------------------------------------------------------------


def test_the_corpus_is_the_one_source(config):
    folder, manifest = text_corpus.open_corpus(config)
    prepared = open_sources(config)
    (source,) = prepared.sources.values()
    assert list(prepared.sources) == ["corpus"]
    assert (source.name, source.folder, source.manifest, source.max_epochs) == ("corpus", folder, manifest, None)
    assert prepared.baselines == text_corpus.corpus_baselines(config, folder) != {}
    assert prepared.cache == Path(config.data.cache_dir)
    for split in ("train", "heldout"):
        documents, opened = prepared.open("corpus", split, PhaseConfig(tokens=1), 16)
        assert (len(documents), opened) == (manifest.split(split).documents, manifest)


def test_the_corpus_is_checked_and_what_to_do_is_told(config):
    folder = open_sources(config).sources["corpus"].folder
    shard = folder / "train-000000.arrayrecord"
    content = shard.read_bytes()
    shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(
        InputError, match=f"{re.escape(str(shard))} was altered.*Delete the folder {re.escape(str(folder))}"
    ):
        open_sources(config)
    shutil.rmtree(folder)
    assert open_sources(config).sources["corpus"].folder == folder


def test_a_second_call_reads_no_file_again(config, monkeypatch, capfd):
    first = open_sources(config)
    assert first.baselines
    capfd.readouterr()
    for name, module in (("_prepare", text_corpus), ("describe_file", manifest)):
        monkeypatch.setattr(module, name, None)
    second = open_sources(config)
    assert (second.sources, second.baselines) == (first.sources, first.baselines)
    assert capfd.readouterr() == ("", "")


def test_a_cache_that_cannot_be_written_is_named(tmp_path, make_config, config):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=re.escape(f"data.cache_dir ({tmp_path / 'file'}) cannot be written")):
        open_sources(make_config(config.data.corpus, tmp_path / "file"))


def test_a_home_folder_is_found(config, tmp_path, monkeypatch, made):
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copytree(made["x"], tmp_path / "x")
    data = dataclasses.replace(config.data, cache_dir="~/notes")
    prepared = open_sources(with_sources(dataclasses.replace(config, data=data), x="~/x"))
    assert prepared.sources["x"].folder == tmp_path / "x"
    assert prepared.cache == tmp_path / "notes"


def test_jax_stays_unimported(config):
    code = (
        "import sys, pickle; from zaya_jax.data.loading.batches import heldout_text;"
        "from zaya_jax.data.loading.sources import open_sources;"
        "config = pickle.loads(sys.stdin.buffer.read()); prepared = open_sources(config);"
        "list(heldout_text(config, prepared, 'corpus').read());"
        "assert not {'jax', 'grain'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], input=pickle.dumps(config), check=True)


# --- several sources -------------------------------------------------------------------------------------------


def test_sources_stand_in_the_order_given(config, made):
    data = dataclasses.replace(
        config.data, sources=Table({"y": SourceConfig(str(made["y"]), 2.5), "x": SourceConfig(str(made["x"]))})
    )
    prepared = open_sources(dataclasses.replace(config, data=data))
    assert list(prepared.sources) == ["y", "x"]
    assert [source.max_epochs for source in prepared.sources.values()] == [2.5, None]
    assert prepared.baselines == {}
    assert not Path(config.data.corpus).with_name("cache").joinpath("corpus").exists()
    documents, manifest = prepared.open("x", "train", PhaseConfig(tokens=1), 16)
    assert manifest == prepared.sources["x"].manifest
    assert all(prepared.tokenizer.decode(document.tokens[1:-1]).startswith("x ") for document in documents)


def test_the_digest_follows_the_content_and_not_the_place(config, made, tmp_path, tokenizers):
    shutil.copytree(made["x"], tmp_path / "moved")

    def content(folder):
        return open_sources(with_sources(config, x=folder)).sources["x"].manifest.content

    assert content(tmp_path / "moved") == content(made["x"])
    contents = {content(made["x"])}
    for text in ("other text", "third text"):  # files of the same size, at the same place one after the other
        contents.add(content(make_source(tmp_path / "again", [f"{text} {i}" for i in range(9)], tokenizers["a"],
                                         heldout=0.5)))  # fmt: skip
        shutil.rmtree(tmp_path / "again")
    assert len(contents) == 3


def test_a_folder_that_is_missing_or_has_no_manifest_is_named_with_its_key(config, tmp_path):
    (tmp_path / "empty").mkdir()
    for name, advice in (("no", "zaya_jax.data prepare"), ("empty", "")):
        path = re.escape(str(tmp_path / name))
        with pytest.raises(InputError, match=rf"data\.sources\.x cannot be read\. .*{path}.*{advice}"):
            open_sources(with_sources(config, x=tmp_path / name))


@pytest.mark.parametrize("damage", ["missing", "truncated", "altered"])
def test_a_damaged_file_of_a_source_is_named(config, made, tmp_path, damage):
    folder = shutil.copytree(made["x"], tmp_path / "x")
    shard = next(folder.glob("train-*.arrayrecord"))
    content = shard.read_bytes()
    shard.unlink()
    if damage != "missing":
        shard.write_bytes(content[:-1] + (bytes([content[-1] ^ 1]) if damage == "altered" else b""))
    remedy = f"prepare the data again in a folder other than {folder}"
    with pytest.raises(InputError, match=f"{re.escape(str(shard))}.*{re.escape(remedy)}"):
        open_sources(with_sources(config, x=folder))


@pytest.mark.parametrize(("name", "settings"), [("b", {}), ("a", {"eot": "a"})])
def test_sources_of_other_tokenizers_or_ends_of_documents_are_refused(config, made, tmp_path, tokenizers, name,
                                                                      settings):  # fmt: skip
    other = make_source(tmp_path / "b", ["text"] * 9, tokenizers[name], heldout=0.0, **settings)
    with pytest.raises(InputError, match=r"data\.sources\.z and .*sources\.x were prepared with different tokenizers"):
        open_sources(with_sources(config, x=made["x"], z=other))


def test_nothing_to_train_on_or_to_hold_out_is_told(config, made, tmp_path, tokenizers):
    nearly_all = make_source(tmp_path / "h", ["text"], tokenizers["a"], heldout=1 - 1e-9)
    none = make_source(tmp_path / "t", ["text"] * 9, tokenizers["a"], heldout=0.0)
    with pytest.raises(InputError, match=r"None of the sources \(z\) contains a training document"):
        open_sources(with_sources(config, z=nearly_all))
    with pytest.raises(InputError, match=r"No source that a phase reads \(z\) has a held-out document.*--heldout"):
        open_sources(with_sources(config, z=none))
    open_sources(with_sources(config, x=made["x"], z=none))


def test_a_model_with_fewer_tokens_than_the_tokenizer_is_refused(config, made):
    size = open_sources(with_sources(config, x=made["x"])).tokenizer.vocab_size
    models = [dataclasses.replace(config.model, vocab_size=vocab_size) for vocab_size in (size, size - 1)]
    same, smaller = (with_sources(dataclasses.replace(config, model=model), x=made["x"]) for model in models)
    open_sources(same)
    match = rf"{made['x'] / 'tokenizer.json'} has {size} tokens, more than model\.vocab_size \({size - 1}\)"
    with pytest.raises(InputError, match=match):
        open_sources(smaller)
