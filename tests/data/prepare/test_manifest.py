import dataclasses
import json
import re
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.data.prepare.manifest import (
    FORMAT,
    MANIFEST,
    FileEntry,
    Manifest,
    ShardEntry,
    SplitEntry,
    json_digest,
    read_manifest,
)
from zaya_jax.errors import InputError

REMEDY = "Do this. Or that."


@pytest.fixture
def folder(tiny, tmp_path):
    shutil.copytree(tiny[1].sources["corpus"].folder, tmp_path / "data")
    return tmp_path / "data"


def entries(cls, **more):
    names = st.text("abc.-", min_size=1, max_size=9).filter(lambda name: name not in (".", "..", MANIFEST))
    return st.builds(cls, file=names, bytes=st.integers(0, 9), digest=st.text("0f"), **more)


splits = st.builds(
    SplitEntry,
    shards=st.lists(entries(ShardEntry, documents=st.integers(0, 9)), max_size=3).map(tuple),
    lengths=entries(FileEntry),
    documents=st.integers(0, 2**40),
    tokens=st.integers(0, 2**40),
    text_bytes=st.integers(0, 2**40),
)
manifests = st.builds(
    Manifest,
    format=st.just(FORMAT),
    kind=st.sampled_from(["tokens", "masked", "chat"]),
    content=st.text("0f"),
    dtype=st.sampled_from(["|u1", "<u2", "<u4"]),
    tokenizer=entries(FileEntry),
    eot=st.text(),
    train=splits,
    heldout=splits,
    counts=st.dictionaries(st.text(max_size=5), st.integers(0, 9), max_size=3),
    examples=st.lists(st.text(max_size=5), max_size=3).map(tuple),
    extras=st.lists(entries(FileEntry), max_size=2).map(tuple),
)


@given(manifests)
def test_any_manifest_comes_back(tmp_path_factory, manifest):
    folder = tmp_path_factory.mktemp("manifest")
    sizes = {entry.file: entry.bytes for entry in manifest.files()}
    if len({(entry.file, entry.bytes) for entry in manifest.files()}) != len(sizes):
        return  # one file of two sizes
    for file, size in sizes.items():
        (folder / file).write_bytes(bytes(size))
    (folder / MANIFEST).write_text(json.dumps(dataclasses.asdict(manifest)))
    assert read_manifest(folder, REMEDY) == manifest
    assert len(list(folder.iterdir())) == len(sizes) + 1


@given(
    st.lists(st.integers() | st.text() | st.lists(st.integers(), max_size=3)),
    st.lists(st.integers() | st.text() | st.lists(st.integers(), max_size=3)),
)
def test_digests_differ_where_values_do(first, second):
    assert (json_digest(*first) == json_digest(*second)) == (first == second)
    assert json_digest({"a": 1, "b": 2}) == json_digest({"b": 2, "a": 1})


FILES = ["train-000000.arrayrecord", "heldout-000000.arrayrecord", "train-lengths.npy", "heldout-lengths.npy",
         "tokenizer.json"]  # fmt: skip


def refused(folder, path, subject):
    return pytest.raises(InputError, match=rf"{re.escape(str(path))}.*{subject}.*{re.escape(REMEDY)}$")


def test_a_missing_or_truncated_file_is_named(folder):
    for file in FILES:
        content = (folder / file).read_bytes()
        (folder / file).write_bytes(content[:-1])
        with refused(folder, folder / file, f"has {len(content) - 1} bytes, but must have {len(content)}"):
            read_manifest(folder, REMEDY)
        (folder / file).unlink()
        with refused(folder, folder / file, "is missing"):
            read_manifest(folder, REMEDY)
        (folder / file).write_bytes(content)


@pytest.mark.parametrize("name", ["../data/tokenizer.json", "/etc/passwd", ".", "sub/file"])
def test_a_file_outside_of_the_folder_is_refused(folder, name):
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"tokenizer.json"', json.dumps(name)))
    with refused(folder, folder / MANIFEST, f"lists {name!r}, not a file name"):
        read_manifest(folder, REMEDY)


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{}", b'{"train": 1}', b"\xff", b'{"tokenizer": {"x": 1}}'])
def test_a_damaged_manifest_is_named(folder, content):
    (folder / MANIFEST).unlink()
    if content is not None:
        (folder / MANIFEST).write_bytes(content)
    with refused(folder, folder / MANIFEST, "cannot be read"):
        read_manifest(folder, REMEDY)


def test_nobody_is_told_to_delete_a_folder_whose_manifest_could_not_be_read(folder):
    (folder / MANIFEST).unlink()
    (folder / MANIFEST).symlink_to("/proc/self/mem")  # whose first bytes the system refuses to read
    with pytest.raises(InputError, match="Input/output error") as error:
        read_manifest(folder, REMEDY)
    assert REMEDY not in str(error.value)


@pytest.mark.parametrize("fields", [None, '{"format": 99, "corpus_digest": ""}'])
def test_another_format_is_named_whatever_its_fields_are(folder, fields):
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(fields or text.replace('"format": 2', '"format": 99'))
    with refused(folder, folder / MANIFEST, "has format 99, but this version reads format 2"):
        read_manifest(folder, REMEDY)
