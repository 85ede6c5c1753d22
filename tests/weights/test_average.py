import numpy as np
import pytest

from tests.checkpoint.saved_helpers import drawn, flip, save_run
from tests.train_helpers import MODEL
from zaya_jax.checkpoint.arrays import named
from zaya_jax.checkpoint.reader import open_checkpoint, verify_checkpoint
from zaya_jax.config import to_dict
from zaya_jax.errors import InputError
from zaya_jax.run.manifest import read_manifest
from zaya_jax.weights.average import average_checkpoints


def folders(run, steps):
    return [run / "checkpoints" / str(step) for step in steps]


@pytest.mark.parametrize("order", [[1, 2, 4], [4, 1, 2]])
def test_parameters_are_means_and_the_rest_is_the_newest(tmp_path, order):
    run = save_run(tmp_path / "run", [1, 2, 4], {4: 1.0}, model=to_dict(MODEL))
    folder = average_checkpoints(folders(run, order), tmp_path / "mean")
    assert folder == tmp_path / "mean" / "checkpoints" / "4"
    assert verify_checkpoint(folder) == []
    _, reader = open_checkpoint(folder)
    states = [named(drawn(step)) for step in (1, 2, 4)]
    for name, newest in states[-1].items():
        value = reader.read(name)
        if name.startswith(("params.", "balance.")):
            exact = np.mean([np.asarray(state[name], np.float64) for state in states], axis=0)
            np.testing.assert_array_equal(value, exact.astype(value.dtype), err_msg=name)
        else:
            np.testing.assert_array_equal(value, newest, err_msg=name)
    metadata = read_manifest(folder).metadata
    assert (metadata["averaged"], metadata["heldout_loss"]) == ([1, 2, 4], None)


def test_a_damaged_one_is_not_averaged(tmp_path):
    run = save_run(tmp_path / "run", [1, 2], model=to_dict(MODEL))
    flip(run / "checkpoints" / "1")
    with pytest.raises(InputError, match=r"checkpoints/1"):
        average_checkpoints(folders(run, [1, 2]), tmp_path / "mean")
    assert not (tmp_path / "mean" / "checkpoints" / "2").exists()


def test_one_alone_has_no_average(tmp_path):
    run = save_run(tmp_path / "run", [1])
    with pytest.raises(InputError, match="average got 1 checkpoint, but needs at least 2"):
        average_checkpoints(folders(run, [1]), tmp_path / "mean")
