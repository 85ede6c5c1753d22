"""Kills while saving, damaged checkpoints and full disks under a supervisor: training continues from what is intact."""

import random
import shutil
import subprocess
import time

import psutil
import pytest

from tests.aegis.hooked_trainer import DAMAGES
from tests.aegis.real_helpers import Run, undisturbed
from tests.checkpoint.test_disk import fill
from zaya_jax.run.checkpoints import saved_steps

pytestmark = pytest.mark.soak  # tests/checkpoint has what is quick of it, without a supervisor


def kill_while_saving(run, supervised, times, rng):
    """Kill the trainer at random moments after a save has begun, so often; return how often it was."""
    killed, folder, seen = 0, run.run_dir / "checkpoints", set()
    while killed < times and supervised.process.poll() is None:
        try:
            saves = {path.stat().st_ino for path in folder.glob("*tmp*")}
        except FileNotFoundError:  # one was finished just now
            continue
        is_new, seen = bool(saves - seen), saves
        if not is_new or rng.random() < 0.5:  # let some saves finish: these must survive the next kill
            time.sleep(0.001)
            continue
        time.sleep(rng.random() * 0.15)
        for child in psutil.Process(supervised.process.pid).children():
            child.kill()
        killed += 1
        time.sleep(0.5)
    return killed


def test_twenty_kills_while_saving_lose_nothing(tmp_path):
    kills, steps = 20, 200
    expected = undisturbed(tmp_path, 1, steps)
    run = Run(tmp_path, 1, steps)
    supervised = run.start()
    assert kill_while_saving(run, supervised, kills, random.Random(3)) == kills
    assert supervised.wait(600) == 0
    assert run.results() == expected
    assert all(path.name.isdecimal() or path.name == "GENERATION" for path in (run.run_dir / "checkpoints").iterdir())


def test_damaged_checkpoints_are_quarantined_and_older_ones_used(tmp_path):
    steps = 10 + 12 * len(DAMAGES)
    expected = undisturbed(tmp_path, 1, steps, "checkpoint.keep=3")
    run = Run(tmp_path, 1, steps, "disturbed", "checkpoint.keep=3")
    supervised = run.start(*(f"{kind}@0:{12 * index + 9}:data" for index, kind in enumerate(DAMAGES)))
    assert supervised.wait(600) == 0, supervised.said
    assert run.made == len(DAMAGES)
    quarantined = (path.name for path in (run.run_dir / "checkpoints").glob("*.corrupt*"))
    damaged = [int(name.partition(".")[0]) for name in sorted(quarantined, key=lambda name: name.rpartition("-")[2])]
    assert len(damaged) == len(DAMAGES)
    resumed = [end["first_step"] for end in supervised.kinds("end")[1:]]
    assert all(0 < old < new for old, new in zip(resumed, damaged, strict=True)), (resumed, damaged)
    assert run.results() == expected


def test_a_full_disk_restarts_nothing_and_saving_resumes(tmp_path):
    """Nor does a supervisor that cannot write its own files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(disk)]
    if not shutil.which("mount") or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        expected = undisturbed(tmp_path, 1, 120)
        run = Run(disk, 1, 120)
        supervised = run.start()
        supervised.wait_for(run.run_dir / "checkpoints" / "8", 60)
        fill(disk / "ballast", 0)
        time.sleep(3.0)
        assert saved_steps(run.run_dir / "checkpoints")
        (disk / "ballast").unlink()
        assert supervised.wait(600) == 0, supervised.said
        assert len(supervised.kinds("start")) == 1
        assert "disk-low" in [event["code"] for event in supervised.faults]
        assert max(saved_steps(run.run_dir / "checkpoints")) == 120
        assert run.results()[0] == expected[0]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
