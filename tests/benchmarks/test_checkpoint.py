import json

import jax
import numpy as np
import pytest

from benchmarks.__main__ import main
from benchmarks.checkpoint import (
    BARE,
    OURS,
    PEER,
    describe_disk,
    make_methods,
    peak_memory,
    print_table,
    restart_peak,
    summary,
    timed_save,
)
from zaya_jax.lab.measure.storage import LARGE, make_state, time_restores

ROWS = [{"way": way, "turn": turn, "stall": stall * turn, "commit": 1.5 * stall * turn, "memory": 10.0,
         "restore_warm": 1.0, "restore_cold": 2.0}
        for turn in (1, 2, 3) for way, stall in ((PEER, 10.0), (OURS, 1.0), (BARE, 0.8))]  # fmt: skip


@pytest.fixture(scope="module")
def small():
    return make_state(2**20, 3, jax.devices())


def test_a_state_has_the_size_asked_for(small):
    assert sum(x.nbytes for name, x in small.items() if name.startswith("large")) == 2**20
    assert len(small) == LARGE + 3


def test_every_way_gives_back_what_it_saved(small, tmp_path):
    for name, method in make_methods(tmp_path, small).items():
        for turn in (0, 1):
            took = timed_save(method, turn)
            assert 0 < took["stall"] <= took["commit"], name
        assert time_restores(method, tmp_path, small).keys() == {"restore_cold", "restore_warm"}
        other = {**small, "large.0": small["large.0"] + 1}
        with pytest.raises(RuntimeError, match=r"large\.0 was restored from .* with wrong values"):
            time_restores(method, tmp_path, other)


def test_a_peak_counts_what_was_freed_again():
    before = restart_peak()
    array = np.ones(2**27, np.uint8)
    del array
    assert peak_memory() - before == pytest.approx(2**27, rel=0.2)
    assert restart_peak() - before < 2**26


def test_medians_and_ratios(capsys):
    job = summary(0.25, 4, ROWS)
    assert job["ways"][PEER]["stall"] == {"median": 20.0, "least": 10.0, "most": 30.0}
    assert job["stall_ratio"] == 10.0
    assert job["commit_ratio"] == pytest.approx(10.0)
    assert job["digest_share"] == pytest.approx(0.25)
    assert job["restore_ratio"] == 1.0
    print_table(job)
    assert "blocks training 10.0× as long as zaya_jax\n" in capsys.readouterr().out


def test_the_disk_is_described(tmp_path):
    disk = describe_disk(tmp_path)
    assert disk["mb_per_second"] > 0
    assert disk["file_system"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.soak
def test_two_processes_are_measured(tmp_path):
    assert main(["checkpoint", "--gib", "0.01", "--processes", "2", "--repeats", "1", "--folder", str(tmp_path),
                 "--output", str(tmp_path / "out.json"), "--png", str(tmp_path / "out.png")]) == 0  # fmt: skip
    (job,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert set(job["ways"]) == {PEER, "Orbax", "Orbax, asynchronous", OURS, BARE}
    assert all(way["stall"]["median"] > 0 and way["restore_warm"]["median"] > 0 for way in job["ways"].values())
    assert (tmp_path / "out.png").stat().st_size > 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png"]
