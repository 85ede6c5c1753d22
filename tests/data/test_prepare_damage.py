"""Prepared folders that are damaged afterwards, and folders of something else."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.prepare_helpers import (
    MODEL,
    QUARTER,
    make_texts,
    write_jsonl,
)
from zaya_jax.config import Config, DataConfig, PhaseConfig, SourceConfig
from zaya_jax.config.table import Table
from zaya_jax.data.prepare import (
    PrepareSettings,
    open_manifest,
    prepare,
    remedy,
)
from zaya_jax.data.sources import open_sources
from zaya_jax.data.verify import verify_files
from zaya_jax.errors import InputError


@pytest.fixture(scope="module")
def finished(tmp_path_factory, tokenizer):
    folder = tmp_path_factory.mktemp("finished")
    path = write_jsonl(folder / "in.jsonl", make_texts(40))
    return folder / "out", prepare([str(path)], tokenizer, folder / "out", QUARTER, unit_bytes=900, workers=1)


@given(data=st.data(), bit=st.integers(0, 7))
def test_a_flipped_bit_is_reported_with_the_name_of_its_file(tmp_path_factory, finished, data, bit):
    folder, manifest = finished
    entry = data.draw(st.sampled_from(manifest.files()))
    offset = data.draw(st.integers(0, entry.bytes - 1))
    cache = tmp_path_factory.mktemp("cache")
    verify_files(folder, manifest, cache, remedy(folder))  # it is noted as good, and read again once it has changed
    good = (folder / entry.file).read_bytes()
    try:
        (folder / entry.file).write_bytes(good[:offset] + bytes([good[offset] ^ 1 << bit]) + good[offset + 1 :])
        with pytest.raises(InputError, match=rf"^The data file {folder}/{entry.file} was altered: .* Bring the file"):
            verify_files(folder, open_manifest(folder), cache, remedy(folder))
    finally:
        (folder / entry.file).write_bytes(good)
    verify_files(folder, manifest, cache, remedy(folder))


@pytest.mark.parametrize("damage", ["flipped", "shorter", "missing"])
def test_a_run_names_the_shard_that_was_damaged(tmp_path, tokenizer, given_texts, damage):
    output = tmp_path / "out"
    manifest = prepare([str(given_texts)], tokenizer, output, QUARTER, unit_bytes=900, workers=1)
    sources = Table({"books": SourceConfig(str(output))})
    config = Config(
        MODEL, (PhaseConfig(tokens=512),), data=DataConfig(sources=sources, cache_dir=str(tmp_path / "cache"))
    )
    assert open_sources(config).sources["books"].manifest == manifest
    shard = output / manifest.train.shards[2].file
    if damage == "flipped":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
    elif damage == "shorter":
        os.truncate(shard, shard.stat().st_size - 1)
    else:
        shard.unlink()
    with pytest.raises(InputError, match=f"The data file {shard} ") as error:
        open_sources(config)
    if damage != "flipped":  # told at once, by the size
        assert str(error.value).startswith("data.sources.books cannot be read. ")
        with pytest.raises(InputError, match=f"The data file {shard} "):
            prepare([str(given_texts)], tokenizer, output, QUARTER, unit_bytes=900, workers=1)


def test_a_folder_of_something_else_is_left_alone(tmp_path, tokenizer):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("text")
    source = write_jsonl(tmp_path / "in.jsonl", ["one", "two"])
    with pytest.raises(InputError, match=r"mine holds other files, such as 'letter\.txt'; choose a new or an empty"):
        prepare([str(source)], tokenizer, tmp_path / "mine", PrepareSettings(), workers=1)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["letter.txt"]
