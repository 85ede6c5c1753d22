"""Checkpoints by name, by manifest and by path."""

import json
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.test_store import save_all
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import (
    checkpoint_folder,
    clean,
    has_checkpoint,
    named_steps,
    quarantine,
    remove,
    saved_steps,
)
from zaya_jax.run.digests import digest
from zaya_jax.run.manifest import (
    FORMAT,
    Damaged,
    Manifest,
    file_digests,
    has_manifest,
    list_files,
    read_digests,
    read_manifest,
    try_read,
    write_manifest,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints 1 and 2, the first of them the last of phase 'one'; read only."""
    folder = tmp_path_factory.mktemp("folder") / "run"
    save_all(folder / "checkpoints", [1, 2])
    (folder / "phases.json").write_text(json.dumps({"one": 1}))
    return folder


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "run") / "checkpoints"


def test_what_unfinished_saves_left_is_removed_and_nothing_else(copy):
    left = ["3.g1", "3.g1.orbax-checkpoint-tmp", "3.g12.orbax-checkpoint-tmp-77", "1.deleted"]
    kept = ["4.corrupt-20260101T000000", "4.stale-20260101T000000", "notes", "5x.g1", "g1"]
    for name in left + kept:
        (copy / name / "state").mkdir(parents=True)
    (copy / "GENERATION.node.1.2.partial").touch()
    clean(copy)
    assert sorted(path.name for path in copy.iterdir()) == sorted([*kept, "1", "2", "GENERATION"])


def test_steps_are_of_finished_checkpoints_in_order(copy):
    (copy / "10").mkdir()
    (copy / "20.g1").mkdir()
    assert saved_steps(copy) == [1, 2]
    assert named_steps(copy) == [1, 2, 10]
    assert saved_steps(copy / "nowhere") == named_steps(copy / "nowhere") == []


def test_removing_is_done_at_once_and_again_where_it_was_cut_short(copy):
    (copy / "1.deleted" / "state").mkdir(parents=True)  # left where a removal of the same step was killed
    remove(copy, 1)
    assert sorted(path.name for path in copy.iterdir()) == ["2", "GENERATION"]


def test_what_is_set_aside_keeps_its_content_and_never_a_name_twice(copy):
    content = sorted(path.name for path in (copy / "1").iterdir())
    names = set()
    for _ in range(3):
        quarantined = quarantine(copy, 1, "corrupt")
        assert sorted(path.name for path in quarantined.iterdir()) == content
        names.add(quarantined.name)
        shutil.copytree(quarantined, copy / "1")
    assert len(names) == 3
    assert all(name.startswith("1.corrupt-") for name in names)
    shutil.rmtree(copy / "1")
    shutil.rmtree(copy / "2")
    assert has_checkpoint(copy)  # what once was one is no empty folder
    shutil.rmtree(copy)
    (copy / "1.g1").mkdir(parents=True)
    assert not has_checkpoint(copy)


def test_a_checkpoint_is_named_by_its_run_by_itself_or_by_its_phase(run):
    checkpoints = run / "checkpoints"
    assert checkpoint_folder(str(run)) == checkpoints / "2"
    assert checkpoint_folder(str(checkpoints / "1")) == checkpoints / "1"
    assert checkpoint_folder(f"{run}@one") == checkpoints / "1"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("{run}@two", "but the finished phases of .* are: one"),
        ("{run}@onne", r"are: one\. Did you mean .*@one\?"),
        ("{run}/nowhere", r"init_from is '.*/nowhere', which does not exist\.$"),
        ("{run}/nowhere@one", r"init_from is '.*/nowhere@one', but .*/nowhere does not exist\.$"),
        ("{run}/checkpoint/1", r"which does not exist\. Did you mean .*/checkpoints/1\?"),
        ("{run}/checkpoints", "must be a run folder with a checkpoint"),
        ("{run}/checkpoints/7", "which does not exist"),
    ],
)
def test_what_names_none_is_refused(run, path, message):
    with pytest.raises(InputError, match=message):
        checkpoint_folder(path.format(run=run))


PARTS = [{"x": {"0:2": "a"}, "y": {"": "b"}}, {"x": {"2:4": "c"}}, {"x": {"4:6": "d"}}]


def make(folder, **changes):
    """A checkpoint as it is but for its arrays, and its manifest."""
    (folder / "digests").mkdir(parents=True)
    values = folder / "state" / "ocdbt.process_0"
    values.mkdir(parents=True)
    (values / "values").write_bytes(bytes(100))
    (folder / "state" / "tree").write_bytes(b"where which array is")
    for process, parts in enumerate(PARTS):
        (folder / "digests" / f"process_{process}.json").write_text(json.dumps(parts))
    manifest = Manifest(**{
        "step": 3, "fencing_token": 2, "metadata": {"phase": "one", "heldout_loss": 1.5}, "leaves": {},
        "read_back": False,        "files": list_files(folder), "digests": file_digests(folder), **changes,
    })  # fmt: skip
    write_manifest(folder, manifest)
    return manifest


def test_it_is_read_as_it_was_written(tmp_path):
    assert not has_manifest(tmp_path / "1")
    manifest = make(tmp_path / "1")
    assert has_manifest(tmp_path / "1")
    assert read_manifest(tmp_path / "1") == manifest == try_read(tmp_path / "1")
    [written] = (tmp_path / "1").glob("manifest-*")
    tree = json.loads(written.read_bytes())
    assert (tree["generation"], tree["about"]) == (2, {"phase": "one", "heldout_loss": 1.5})  # as earlier versions have
    assert not {"fencing_token", "metadata"} & tree.keys()
    assert set(manifest.digests) == {*(f"digests/process_{n}.json" for n in range(3)), "state/tree"}
    assert manifest.files["state/ocdbt.process_0/values"] == 100


@given(st.data())
def test_with_any_bit_changed_or_cut_anywhere_it_is_refused(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("manifest") / "1"
    make(folder)
    path = next(folder.glob("manifest-*"))
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    else:
        del content[at:]
    path.write_bytes(content)
    with pytest.raises(Damaged, match="does not match its checksum"):
        read_manifest(folder)
    assert try_read(folder) is None


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("state/tree", None, "tree is missing"),
        ("state/tree", b"where which array IS", "tree does not match its checksum"),
        ("state/tree", b"short", "has 5 bytes, but must have 20"),
        ("state/ocdbt.process_0/values", bytes(99), "has 99 bytes, but must have 100"),
        ("digests/process_1.json", b'{"x": {"2:4": "e"}}', "process_1.json does not match its checksum"),
    ],
)
def test_each_file_is_looked_at(tmp_path, file, content, message):
    make(tmp_path / "1")
    if content is None:
        (tmp_path / "1" / file).unlink()
    else:
        (tmp_path / "1" / file).write_bytes(content)
    with pytest.raises(Damaged, match=message):
        read_manifest(tmp_path / "1")
    assert try_read(tmp_path / "1") is not None  # which looks at none


def test_a_newer_format_is_refused_not_called_damaged(tmp_path):
    make(tmp_path / "1", format=FORMAT + 1)
    for read in (read_manifest, try_read):
        with pytest.raises(InputError, match=rf"is a checkpoint of format {FORMAT + 1}, but .* up to {FORMAT}"):
            read(tmp_path / "1")


def test_without_a_manifest_or_with_two_it_is_no_checkpoint(tmp_path):
    with pytest.raises(Damaged, match="contains 0 manifests"):
        read_manifest(tmp_path)
    make(tmp_path / "1")
    (tmp_path / "1" / f"manifest-{digest(b'{}')}.json").write_text("{}")
    with pytest.raises(Damaged, match="contains 2 manifests"):
        read_manifest(tmp_path / "1")


@pytest.mark.parametrize("readers", [1, 2, 3, 5])
def test_readers_see_to_every_part_between_them_and_to_none_twice(tmp_path, readers):
    manifest = make(tmp_path / "1")
    seen = [read_digests(tmp_path / "1", manifest, reader, readers) for reader in range(readers)]
    pairs = [(name, span) for digests in seen for name, parts in digests.items() for span in parts]
    assert sorted(pairs) == [("x", "0:2"), ("x", "2:4"), ("x", "4:6"), ("y", "")]
    assert read_digests(tmp_path / "1", manifest) == {"x": {"0:2": "a", "2:4": "c", "4:6": "d"}, "y": {"": "b"}}
