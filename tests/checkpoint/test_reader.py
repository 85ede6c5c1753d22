"""What is written into a checkpoint is read from it, whole or in parts, and described."""

import errno
import logging
import os
import shutil
import sys
import tempfile
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from hypothesis import example, given, settings

from tests.checkpoint.saved_helpers import drawn, save_run
from tests.checkpoint.test_restore import data_file, flip
from tests.checkpoint.test_store import make_state, save_all
from tests.hostile_names import HOSTILE_NAMES
from zaya_jax.checkpoint.arrays import SMALL_ARRAYS, named
from zaya_jax.checkpoint.commands import diff, inspect
from zaya_jax.checkpoint.digest import PIECE, ArrayPart
from zaya_jax.checkpoint.orbax_save import _hide_closed_loops, _in_chunks, start_save
from zaya_jax.checkpoint.reader import CheckpointReader, open_checkpoint, verify_checkpoint, wrong_parts
from zaya_jax.checkpoint.writer import write_checkpoint
from zaya_jax.errors import InputError
from zaya_jax.run.digests import digest
from zaya_jax.run.manifest import STATE, Damaged, Unreadable, read_digests, read_manifest

WIDTH = 3000


def test_arrays_are_read_whole_and_in_pieces_without_devices(tmp_path):
    save_all(tmp_path, [1], width=WIDTH)
    _, reader = open_checkpoint(tmp_path / "1")
    for name, array in named(make_state(1, WIDTH)).items():
        read = reader.read(name)
        assert read.dtype == array.dtype
        assert read.tobytes() == np.asarray(array).tobytes()
        if read.ndim:
            assert np.array_equal(reader.read(name, (slice(1, 2),)), np.asarray(array)[1:2])


def test_an_array_that_is_not_there_is_named_and_is_no_damage(tmp_path):
    save_all(tmp_path, [1])
    with pytest.raises(Unreadable, match=r"The array nothing in .* cannot be read"):
        CheckpointReader(tmp_path / "1", {}).read("nothing")


def test_only_what_is_missing_cut_or_altered_is_called_damaged(tmp_path):
    save_all(tmp_path, [1], width=WIDTH)
    for name in ("intact", "cut", "loop", "gone", "altered"):
        shutil.copytree(tmp_path / "1", tmp_path / name)
    manifest = read_manifest(tmp_path / "1")
    said = {}
    for name, change in {
        "intact": lambda file: None,
        "cut": lambda file: os.truncate(file, 9),
        "loop": lambda file: (file.unlink(), file.symlink_to(file)),
        "gone": lambda file: file.unlink(),
        "altered": lambda file: flip(file, 3),
    }.items():
        change(tmp_path / name / STATE / "manifest.ocdbt")
        try:
            CheckpointReader(tmp_path / name, manifest.leaves, manifest.files).read("params.blocks.0.query")
            said[name] = None
        except InputError as error:
            said[name] = type(error)
    assert said == {"intact": None, "cut": Damaged, "loop": Unreadable, "gone": Damaged, "altered": Damaged}


def test_what_passes_is_read_again_and_what_stays_is_told(tmp_path, monkeypatch):
    save_all(tmp_path, [1], width=WIDTH)
    manifest, reader = open_checkpoint(tmp_path / "1")
    file, pauses = tmp_path / "1" / STATE / "manifest.ocdbt", []
    content = file.read_bytes()

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 2:  # it comes back
            file.unlink()
            file.write_bytes(content)

    monkeypatch.setattr("zaya_jax.checkpoint.reader._PASSING", {errno.ELOOP})
    monkeypatch.setattr("zaya_jax.checkpoint.reader.time.sleep", pause)
    for times in (2, 3):
        file.unlink()
        file.symlink_to(file)
        if times == 3:
            pauses.extend([0] * 2)
            with pytest.raises(Unreadable, match="may be intact"):
                CheckpointReader(tmp_path / "1", manifest.leaves, manifest.files).read("params.blocks.0.query")
        else:
            assert reader.read("params.blocks.0.query").shape[1] == WIDTH
            assert pauses == sorted(pauses)


@given(HOSTILE_NAMES)
@example("%41")
@example("a\\b")
@settings(max_examples=12)
def test_a_checkpoint_can_be_in_a_folder_of_any_name(name):
    with tempfile.TemporaryDirectory() as base:
        folder = Path(base) / name / "5"
        write_checkpoint(folder, 5, {}, LEAVES, parts((0, 4)))
        assert verify_checkpoint(folder) == []
        start_save(folder.with_name("6"), {"n": np.array(7, np.int32)})()
        assert CheckpointReader(folder.with_name("6"), {}).read("n") == 7
        assert os.listdir(base) == [name]


def test_a_flipped_value_is_named_with_its_part(tmp_path):
    save_all(tmp_path, [1], width=WIDTH)
    folder = tmp_path / "1"
    assert verify_checkpoint(folder) == []
    manifest, reader = open_checkpoint(folder)
    expected = read_digests(folder, manifest)
    content = bytearray(data_file(folder).read_bytes())
    value = np.asarray(make_state(1, WIDTH)["params"]["blocks.0.query"])[1].tobytes()
    flip(data_file(folder), content.index(value[:64]) + 5)
    (message,) = verify_checkpoint(folder)
    assert message == f"The array params.blocks.0.query[0:2,0:{WIDTH}] in {folder} does not match its checksum."
    assert list(wrong_parts(reader, expected)) == [message]
    (folder / "digests" / "process_0.json").write_text("{}")
    assert "process_0.json" in verify_checkpoint(folder)[0]


def test_a_checkpoint_of_which_a_file_is_gone_is_told(tmp_path):
    save_all(tmp_path, [1], width=WIDTH)
    file = data_file(tmp_path / "1")
    manifest, reader = open_checkpoint(tmp_path / "1")
    expected = read_digests(tmp_path / "1", manifest)
    file.unlink()
    assert verify_checkpoint(tmp_path / "1") == [f"{file} is missing."]
    messages = list(wrong_parts(reader, expected))
    assert messages
    assert all("cannot be read" in sentence for sentence in messages)


ARRAYS = {"large": jnp.arange(6000.0).reshape(2, 3000), SMALL_ARRAYS: np.arange(10, dtype=np.uint8)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "1"
    start_save(folder, ARRAYS)()
    return folder


def test_nothing_is_compressed(saved):
    store = {"driver": "ocdbt", "base": f"file://{saved / STATE}/"}
    large = tensorstore.open({"driver": "zarr3", "kvstore": {**store, "path": "large/"}}, open=True).result()
    assert "zstd" not in str(large.spec().to_json()["metadata"])


def test_arrays_over_a_piece_are_cut_along_their_first_axis():
    class Large:
        nbytes = PIECE + 1

    assert _in_chunks((), ARRAYS["large"]) is None
    options = _in_chunks((), Large())
    assert (options.chunk_byte_size, options.shard_axes) == (PIECE, (0,))


def test_a_thread_that_fails_after_the_end_of_a_save_prints_no_traceback(saved, caplog):
    log = logging.getLogger("absl")
    log.error("[thread=%s] _SignalingThread.run() raised an exception: %s", "a", "no space")
    log.error("something else")
    assert [record.message for record in caplog.records] == ["something else"]


def test_an_operation_that_outlives_the_event_loop_of_its_save_prints_no_traceback(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: seen.append(str(unraisable.exc_value)))
    _hide_closed_loops.__wrapped__()
    for text in ("Event loop is closed", "something else"):
        promise, future = tensorstore.Promise.new()
        future.add_done_callback(lambda _, text=text: exec(f"raise RuntimeError({text!r})"))  # noqa: S102
        promise.set_result(1)
    assert seen == ["something else"]


X = np.arange(24, dtype=np.float32).reshape(4, 6)
LEAVES = {"x": {"dtype": "float32", "shape": [4, 6]}, "n": {"dtype": "int32", "shape": []}}


def parts(*bounds):
    for start, stop in bounds:
        yield ArrayPart("x", f"{start}:{stop},0:6", X[start:stop])
    yield ArrayPart("n", "", np.array(7, np.int32))


@pytest.mark.parametrize("bounds", [[(0, 4)], [(0, 1), (1, 2), (2, 3), (3, 4)], [(0, 3), (3, 4)], [(2, 4), (0, 2)]])
def test_parts_make_a_checkpoint(tmp_path, bounds):
    folder = tmp_path / "checkpoints" / "5"
    write_checkpoint(folder, 5, {"heldout_loss": None}, LEAVES, parts(*bounds))
    assert verify_checkpoint(folder) == []
    _, reader = open_checkpoint(folder)
    np.testing.assert_array_equal(reader.read("x"), X)
    assert reader.read("n") == 7
    assert read_manifest(folder).step == 5
    assert [path.name for path in folder.parent.iterdir()] == ["5"]


def test_nothing_is_left_where_a_part_cannot_be_made(tmp_path):
    def broken():
        yield ArrayPart("x", "0:2,0:6", X[:2])
        raise InputError("no more")

    with pytest.raises(InputError, match="no more"):
        write_checkpoint(tmp_path / "checkpoints" / "5", 5, {}, LEAVES, broken())
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_is_there_stays(tmp_path):
    (tmp_path / "5").mkdir()
    with pytest.raises(InputError, match="already exists; choose a new run folder"):
        write_checkpoint(tmp_path / "5", 5, {}, LEAVES, parts((0, 4)))


def test_norms_are_those_of_the_arrays(tmp_path):
    arrays = named(drawn(3))
    lines = list(inspect(str(save_run(tmp_path, [3]))))[4:]
    assert [line.split()[0] for line in lines] == sorted(arrays)
    for line in lines:
        name, dtype, shape, norm, largest = line.split()
        exact = np.asarray(arrays[name], np.float64)
        assert (norm, largest) == (f"{np.linalg.norm(exact):.6g}", f"{np.abs(exact).max():.6g}")
        assert (dtype, shape) == (str(arrays[name].dtype), "×".join(map(str, exact.shape)) or "scalar")


def test_distances_are_those_of_the_arrays(tmp_path):
    run = save_run(tmp_path, [1, 2])
    first, second = named(drawn(1)), named(drawn(2))
    lines = dict(line.split(": ") for line in diff(f"{run}/checkpoints/1", f"{run}/checkpoints/2"))
    assert lines.keys() == {name for name in first if not np.array_equal(first[name], second[name])}
    for name, line in lines.items():
        x, y = (np.asarray(arrays[name], np.float64) for arrays in (first, second))
        relative = np.linalg.norm(x - y) / np.linalg.norm(x)
        assert line == f"max abs diff {np.abs(x - y).max():.6g}, relative norm {relative:.3g}"


def test_other_arrays_are_named(tmp_path):
    first, second = save_run(tmp_path / "a", [1]), save_run(tmp_path / "b", [1])
    path = next((second / "checkpoints" / "1").glob("manifest-*.json"))
    text = path.read_text().replace('"params.norm.weight"', '"params.norm.other"')
    path.unlink()
    (path.parent / f"manifest-{digest(text.encode())}.json").write_text(text)
    lines = set(diff(str(first), str(second)))
    assert lines >= {"params.norm.weight: only in the first", "params.norm.other: only in the second"}


def test_keys_that_differ_are_named_with_both_values(tmp_path):
    first, second = (str(save_run(tmp_path / name, [1], train={"remat": name})) for name in ("none", "full"))
    assert list(diff(first, second)) == ["train.remat: 'none' vs 'full'"]
    assert list(diff(first, first)) == []
