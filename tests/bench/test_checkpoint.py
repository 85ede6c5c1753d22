import json

import pytest

from zaya_jax.bench.__main__ import main
from zaya_jax.bench.checkpoint import BARE, OURS, PEER, describe_disk, print_table, summary

ROWS = [{"way": way, "turn": turn, "stall": stall * turn, "commit": 1.5 * stall * turn, "memory": 10.0,
         "restore_warm": 1.0, "restore_cold": 2.0}
        for turn in (1, 2, 3) for way, stall in ((PEER, 10.0), (OURS, 1.0), (BARE, 0.8))]  # fmt: skip


def test_medians_and_ratios(capsys):
    found = summary(0.25, 4, ROWS)
    assert found["ways"][PEER]["stall"] == {"median": 20.0, "least": 10.0, "most": 30.0}
    assert found["stall_ratio"] == 10.0
    assert found["commit_ratio"] == pytest.approx(10.0)
    assert found["digest_share"] == pytest.approx(0.25)
    assert found["restore_ratio"] == 1.0
    low, high = found["stall_interval"]
    assert 10 / 3 <= low < 10 < high <= 30
    print_table(found)
    assert f"stalls 10.0× shorter ({low:.1f} to {high:.1f}) than gather and pickle" in capsys.readouterr().out


def test_the_disk_is_named(tmp_path):
    found = describe_disk(tmp_path)
    assert found["mb_per_second"] > 0
    assert found["file_system"]
    assert list(tmp_path.iterdir()) == []


def test_bad_numbers_are_refused(capsys, tmp_path):
    assert main(["checkpoint", "--gib", "0"]) == 2
    assert "--gib is 0.0, but must be numbers above zero" in capsys.readouterr().err
    assert main(["checkpoint", "--folder", str(tmp_path / "none")]) == 2
    assert "but must be a folder on the disk that is measured" in capsys.readouterr().err


@pytest.mark.soak
def test_two_processes_are_measured(tmp_path, capsys):
    assert main(["checkpoint", "--gib", "0.01", "--processes", "2", "--repeats", "1", "--folder", str(tmp_path),
                 "--output", str(tmp_path / "out.json"), "--png", str(tmp_path / "out.png")]) == 0  # fmt: skip
    (found,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert set(found["ways"]) == {PEER, "Orbax", "Orbax, asynchronous", OURS, BARE}
    assert all(ways["stall"]["median"] > 0 and ways["restore_warm"]["median"] > 0 for ways in found["ways"].values())
    assert found["ways"][OURS]["verify_cold"]["median"] > 0
    assert found["ways"][OURS]["step_inflation"]["median"] > 0.5
    assert "step_inflation" not in found["ways"][PEER]
    assert (tmp_path / "out.png").stat().st_size > 1000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png"]
