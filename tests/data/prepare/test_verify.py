import os
import re
import shutil
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.data.prepare import manifest as manifests
from zaya_jax.data.prepare.manifest import MANIFEST, read_manifest, verify_files
from zaya_jax.errors import InputError

REMEDY = "Do this. Or that."
FILES = ["train-000000.arrayrecord", "heldout-000000.arrayrecord", "train-lengths.npy", "heldout-lengths.npy",
         "tokenizer.json"]  # fmt: skip


@pytest.fixture
def folder(tiny, tmp_path):
    shutil.copytree(tiny[1].sources["corpus"].folder, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def cache(tmp_path):
    (tmp_path / "cache").mkdir()
    return tmp_path / "cache"


@pytest.fixture
def read(monkeypatch):
    """The names of the files that are read from now on."""
    names, real = [], manifests.describe_file
    monkeypatch.setattr(manifests, "describe_file", lambda path: names.append(path.name) or real(path))
    return names


def check(folder, cache):
    verify_files(folder, read_manifest(folder, REMEDY), cache, REMEDY)


def alter(path, place=None):
    """Flip one bit; the size stays, and the time of change does not."""
    content, stat = bytearray(path.read_bytes()), path.stat()
    content[len(content) // 2 if place is None else place] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))


def refused(folder, file):
    return pytest.raises(
        InputError,
        match=rf"^The data file {re.escape(str(folder / file))} was altered: its checksum.*{re.escape(REMEDY)}$",
    )


@given(file=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), known=st.booleans())
def test_a_flipped_bit_anywhere_is_refused_until_it_is_restored(tiny, tmp_path_factory, file, place, known):
    root = tmp_path_factory.mktemp("root")
    folder = shutil.copytree(tiny[1].sources["corpus"].folder, root / "data")
    if known:
        check(folder, root)
    place = int(place * (folder / file).stat().st_size)
    alter(folder / file, place)
    for _ in range(2):  # what was refused is not taken for good the next time
        with refused(folder, file):
            check(folder, root)
    alter(folder / file, place)
    check(folder, root)


def test_a_file_is_read_once_as_it_lies_there(folder, cache, read):
    check(folder, cache)
    assert sorted(read) == sorted(FILES)
    check(folder, cache)
    assert len(read) == len(FILES)


def test_a_file_with_a_new_time_alone_is_read_again_alone(folder, cache, read):
    check(folder, cache)
    for file in FILES:
        read.clear()
        os.utime(folder / file)
        check(folder, cache)
        check(folder, cache)
        assert read == [file]


@pytest.mark.parametrize(
    "notes",
    [b"", b"[]", b"3", b"null", b"{", b"\xff", b'{"tokenizer.json": null}', b'{"tokenizer.json": ["", 0, 0]}'],
    ids=lambda notes: notes.decode("latin1"),
)
def test_damaged_notes_are_made_anew(folder, cache, read, notes):
    check(folder, cache)
    (path,) = cache.glob("*.json")
    good = path.read_bytes()
    path.write_bytes(notes)
    read.clear()
    check(folder, cache)
    assert sorted(read) == sorted(FILES)
    assert path.read_bytes() == good
    alter(folder / FILES[1])
    path.write_bytes(notes)
    with refused(folder, FILES[1]):
        check(folder, cache)


def test_a_file_that_was_good_for_another_manifest_is_read_for_this_one(folder, cache):
    check(folder, cache)
    file = FILES[0]
    text = (folder / MANIFEST).read_text()
    (folder / MANIFEST).write_text(re.sub(rf'("{file}",\s+"bytes": \d+,\s+"digest": ")\w', r"\1x", text))
    with refused(folder, file):
        check(folder, cache)


def test_each_folder_has_its_notes_however_it_is_named(folder, cache, tmp_path, read):
    check(folder, cache)
    other = shutil.copytree(folder, tmp_path / "other")
    check(other, cache)
    assert len(read) == 2 * len(FILES)
    assert len(list(cache.glob("*.json"))) == 2
    (tmp_path / "link").symlink_to(folder)
    check(tmp_path / "link", cache)
    assert len(read) == 2 * len(FILES)


def test_several_processes_at_once_leave_whole_notes(folder, cache, read):
    code = (
        "import sys; from pathlib import Path; from zaya_jax.data.prepare.manifest import MANIFEST, read_manifest;"
        "from zaya_jax.data.prepare.manifest import verify_files; folder, cache = map(Path, sys.argv[1:]);"
        "print('ready', flush=True); sys.stdin.read(1);"
        "[([p.unlink(missing_ok=True) for p in cache.glob('*.json')],"
        "  verify_files(folder, read_manifest(folder, ''), cache, '')) for _ in range(20)]"
    )
    command = [sys.executable, "-c", code, str(folder), str(cache)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        process.stdin.close()
    for process in processes:
        process.stdout.close()
        assert process.wait(timeout=60) == 0
    check(folder, cache)
    assert sorted(path.suffix for path in cache.iterdir()) == [".json", ".lock"]
    read.clear()
    check(folder, cache)
    assert read == []
