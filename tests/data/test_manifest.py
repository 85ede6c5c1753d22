import re
import shutil

import pytest

from zaya_jax.data.manifest import MANIFEST, open_manifest
from zaya_jax.errors import InputError


@pytest.fixture
def folder(tiny, tmp_path):
    shutil.copytree(tiny[1].folder, tmp_path / "data")
    return tmp_path / "data"


def test_what_was_written_is_read(tiny, folder):
    manifest = open_manifest(folder)
    assert manifest == tiny[1].manifest
    names = {entry.file for entry in manifest.files()}
    assert names | {MANIFEST} == {path.name for path in folder.iterdir()}


FILES = ["train-00000.arrayrecord", "heldout-00000.arrayrecord", "train-lengths.npy", "heldout-lengths.npy",
         "tokenizer.json", "baselines.json"]  # fmt: skip


def refused(folder, path, what):
    remedy = f"Delete the folder {folder}, so that the next run prepares it anew."
    return pytest.raises(InputError, match=rf"{re.escape(str(path))}.*{what}.*{re.escape(remedy)}")


@pytest.mark.parametrize("file", FILES)
def test_a_missing_file_is_named(folder, file):
    (folder / file).unlink()
    with refused(folder, folder / file, "is missing"):
        open_manifest(folder)


@pytest.mark.parametrize("file", FILES)
def test_a_truncated_file_is_named(folder, file):
    content = (folder / file).read_bytes()
    (folder / file).write_bytes(content[:-1])
    with refused(folder, folder / file, f"has {len(content) - 1} bytes instead of {len(content)}"):
        open_manifest(folder)


@pytest.mark.parametrize("file", FILES)
def test_one_altered_bit_is_noticed(folder, file):
    content = bytearray((folder / file).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / file).write_bytes(content)
    with refused(folder, folder / file, "was altered"):
        open_manifest(folder)


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{}", b'{"train": 1}', b"\xff", b'{"tokenizer": {"x": 1}}'])
def test_a_damaged_manifest_is_named(folder, content):
    (folder / MANIFEST).unlink()
    if content is not None:
        (folder / MANIFEST).write_bytes(content)
    with refused(folder, folder / MANIFEST, "cannot be read"):
        open_manifest(folder)


def test_another_format_is_named(folder):
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(text.replace('"format": 1', '"format": 99'))
    with refused(folder, folder / MANIFEST, "is of format 99"):
        open_manifest(folder)
