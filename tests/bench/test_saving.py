import math

import jax
import numpy as np
import pytest

from zaya_jax.bench import saving
from zaya_jax.bench.saving import Peak, forget, make_state, make_ways, timed_restores, timed_save, timed_steps


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(saving, "SMALL", 3)
    return make_state(2**20)


def test_a_state_has_the_size_asked_for(small):
    assert sum(x.nbytes for name, x in small.items() if name.startswith("large")) == 2**20
    assert len(small) == saving.LARGE + 3


def test_every_way_gives_back_what_it_saved(small, tmp_path):
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), small)
    for name, way in make_ways(tmp_path, small, abstract).items():
        for turn in (0, 1):
            took = timed_save(way, turn)
            assert 0 < took["stall"] <= took["commit"], name
        kinds = {"restore_cold", "restore_warm"} | ({"verify_cold", "verify_warm"} if name == "verified" else set())
        assert timed_restores(way, tmp_path, small).keys() == kinds
        inflation = timed_steps(way, 2)["step_inflation"]
        assert math.isnan(inflation) if name == "gather and pickle" else inflation > 0.1
        other = {**small, "large.0": small["large.0"] + 1}
        with pytest.raises(RuntimeError, match=r"large\.0 came back with other values"):
            timed_restores(way, tmp_path, other)


def test_a_peak_counts_what_is_taken_inside():
    with Peak() as peak:
        held = np.ones(2**26, np.uint8)
        while peak.bytes < 2**25:
            held += 1
    assert peak.bytes >= 2**25


def test_forgotten_files_are_as_they_were(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 10_000)
    forget(tmp_path)
    assert (tmp_path / "a").read_bytes() == b"x" * 10_000
