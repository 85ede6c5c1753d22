import math

import numpy as np
import pytest

from tests.checkpoint.saved_helpers import drawn, save_run
from zaya_jax.checkpoint.inspection import compare_checkpoints, configurations, inspect_checkpoint, open_checkpoint
from zaya_jax.checkpoint.leaves import named
from zaya_jax.errors import InputError
from zaya_jax.run.digests import digest


def test_norms_are_those_of_the_arrays(tmp_path):
    folder = save_run(tmp_path, [3]) / "checkpoints" / "3"
    arrays = named(drawn(3))
    found = {leaf.name: leaf for leaf in inspect_checkpoint(folder)}
    assert found.keys() == arrays.keys()
    for name, x in arrays.items():
        exact = np.asarray(x, np.float64)
        assert found[name].norm == pytest.approx(np.linalg.norm(exact), rel=1e-12)
        assert found[name].largest == np.abs(exact).max()
        assert (found[name].shape, found[name].dtype, found[name].finite) == (x.shape, str(x.dtype), True)


def test_distances_are_those_of_the_arrays(tmp_path):
    run = save_run(tmp_path, [1, 2])
    one, other = named(drawn(1)), named(drawn(2))
    found = {d.name: d for d in compare_checkpoints(run / "checkpoints" / "1", run / "checkpoints" / "2")}
    assert found.keys() == {name for name in one if not np.array_equal(one[name], other[name])}
    for name, distance in found.items():
        x, y = (np.asarray(arrays[name], np.float64) for arrays in (one, other))
        assert distance.largest == np.abs(x - y).max()
        assert distance.relative == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(x), rel=1e-12)


def test_other_arrays_are_named(tmp_path):
    first, second = save_run(tmp_path / "a", [1]), save_run(tmp_path / "b", [1])
    path = next((second / "checkpoints" / "1").glob("manifest-*.json"))
    text = path.read_text().replace('"params.norm.weight"', '"params.norm.other"')
    path.unlink()
    (path.parent / f"manifest-{digest(text.encode())}.json").write_text(text)
    found = {d.name: d for d in compare_checkpoints(first / "checkpoints" / "1", second / "checkpoints" / "1")}
    assert found["params.norm.weight"].note == "only in the first"
    assert found["params.norm.other"].note == "only in the second"
    assert math.isnan(found["params.norm.other"].largest)


def test_keys_that_differ_are_named_with_both_values(tmp_path):
    runs = [save_run(tmp_path / name, [1], train={"remat": name}) for name in ("none", "full")]
    one, other = (open_checkpoint(run / "checkpoints" / "1")[0] for run in runs)
    assert list(configurations(one, other)) == [("train.remat", "none", "full")]
    assert list(configurations(one, one)) == []


def test_what_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(InputError, match="holds 0 manifests"):
        open_checkpoint(tmp_path)
