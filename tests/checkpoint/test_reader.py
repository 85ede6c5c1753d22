import numpy as np
import pytest

from tests.checkpoint.test_restore import data_file, flip
from tests.checkpoint.test_store import make_state, save_all
from zaya_jax.checkpoint.inspection import open_checkpoint
from zaya_jax.checkpoint.leaves import named
from zaya_jax.checkpoint.reader import CheckpointReader, verify_checkpoint, wrong_parts
from zaya_jax.run.manifest import Damaged, read_digests

WIDTH = 3000


def test_arrays_are_read_whole_and_in_pieces_without_devices(tmp_path):
    save_all(tmp_path, [1], width=WIDTH)
    _, reader = open_checkpoint(tmp_path / "1")
    for name, array in named(make_state(1, WIDTH)).items():
        found = reader.read(name)
        assert found.dtype == array.dtype
        assert found.tobytes() == np.asarray(array).tobytes()
        if found.ndim:
            assert np.array_equal(reader.read(name, (slice(1, 2),)), np.asarray(array)[1:2])


def test_an_array_that_is_not_there_is_named(tmp_path):
    save_all(tmp_path, [1])
    with pytest.raises(Damaged, match=r"The array nothing in .* cannot be read"):
        CheckpointReader(tmp_path / "1", {}).read("nothing")


def test_a_flipped_value_is_named_with_its_part(tmp_path):
    save_all(tmp_path, [1], width=WIDTH)
    folder = tmp_path / "1"
    assert verify_checkpoint(folder) == []
    manifest, reader = open_checkpoint(folder)
    expected = read_digests(folder, manifest)
    content = bytearray(data_file(folder).read_bytes())
    value = np.asarray(make_state(1, WIDTH)["params"]["blocks.0.query"])[1].tobytes()
    flip(data_file(folder), content.index(value[:64]) + 5)
    (said,) = verify_checkpoint(folder)
    assert said == f"The array params.blocks.0.query[0:2,0:{WIDTH}] in {folder} is not what was saved."
    assert list(wrong_parts(reader, expected)) == [said]
    (folder / "digests" / "process_0.json").write_text("{}")
    assert "process_0.json" in verify_checkpoint(folder)[0]


def test_a_checkpoint_of_which_a_file_is_gone_is_told(tmp_path):
    save_all(tmp_path, [1], width=WIDTH)
    file = data_file(tmp_path / "1")
    manifest, reader = open_checkpoint(tmp_path / "1")
    expected = read_digests(tmp_path / "1", manifest)
    file.unlink()
    assert verify_checkpoint(tmp_path / "1") == [f"{file} is missing."]
    said = list(wrong_parts(reader, expected))
    assert said
    assert all("cannot be read" in one for one in said)
