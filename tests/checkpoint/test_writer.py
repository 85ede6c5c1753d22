import numpy as np
import pytest

from zaya_jax.checkpoint.digest import Part
from zaya_jax.checkpoint.inspection import open_checkpoint
from zaya_jax.checkpoint.reader import verify_checkpoint
from zaya_jax.checkpoint.writer import write_checkpoint
from zaya_jax.errors import InputError
from zaya_jax.run.manifest import read_manifest

X = np.arange(24, dtype=np.float32).reshape(4, 6)
LEAVES = {"x": {"dtype": "float32", "shape": [4, 6]}, "n": {"dtype": "int32", "shape": []}}


def parts(*bounds):
    for start, stop in bounds:
        yield Part("x", f"{start}:{stop},0:6", X[start:stop])
    yield Part("n", "", np.array(7, np.int32))


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
        yield Part("x", "0:2,0:6", X[:2])
        raise InputError("no more")

    with pytest.raises(InputError, match="no more"):
        write_checkpoint(tmp_path / "checkpoints" / "5", 5, {}, LEAVES, broken())
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_what_is_there_stays(tmp_path):
    (tmp_path / "5").mkdir()
    with pytest.raises(InputError, match="exists; a checkpoint is written into a new folder"):
        write_checkpoint(tmp_path / "5", 5, {}, LEAVES, parts((0, 4)))
