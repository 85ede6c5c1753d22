"""Requests to stop, to whom and when ever: the run is saved, or the newest checkpoint kept, and resumes bitwise."""

import time

import pytest

from tests.aegis.aegis_helpers import left_running
from tests.aegis.real_helpers import Run, undisturbed
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.run.checkpoints import saved_steps

TARGETS = ("sigterm", "term-supervisor", "term-group", "term-twice")
PHASES = ("open", "restore", "compile", "data", "device_wait", "evaluate", "save")


def stop(run, *faults):
    """Let the next of `faults` happen, and check that the run was stopped by it."""
    made = run.made
    supervised = run.start(*faults)
    assert supervised.wait(120) == SupervisorExit.PREEMPTED, supervised.said
    assert run.made == made + 1
    assert not left_running(run.folder)
    (*_, end) = supervised.kinds("end")
    return supervised, end


def test_a_signal_to_the_whole_group_stops_once_and_saves(tmp_path):
    """As of systemd: the trainer gets the signal, and once more from the supervisor."""
    small = ["model.attention=gqa", "model.router=linear", "optimizer.matrices=adamw", "checkpoint.every=1000"]
    run = Run(tmp_path, 1, 600, "disturbed", *small)
    supervised, end = stop(run, "term-group@0:6:data")
    assert "saving after this step, then exiting.\n" in supervised.said
    assert end["exit_statuses"] == [143]
    assert max(saved_steps(run.run_dir / "checkpoints")) == end["last_step"] >= 6
    phases = {"join", "open", "restore", "compile", "data", "dispatch", "device_wait", "evaluate", "save"}
    assert set(end["times"]) >= phases  # that the trainer has entered


@pytest.mark.soak
def test_a_request_to_anyone_in_any_phase_is_heeded_and_the_run_resumes_bitwise(tmp_path):
    expected = undisturbed(tmp_path, 2, 100)
    run = Run(tmp_path, 2, 100)
    faults = [(target, phase, index % 2) for index, (target, phase) in
              enumerate((target, phase) for target in TARGETS for phase in PHASES)]  # fmt: skip
    texts = [f"{target}@{process}:{0 if phase in ('open', 'restore', 'compile') else 2 * index + 2}:{phase}"
             for index, (target, phase, process) in enumerate(faults)]  # fmt: skip
    for text in texts:
        began = time.monotonic()
        _, end = stop(run, *texts)
        newest = max(saved_steps(run.run_dir / "checkpoints"), default=0)
        print(f"{text}: ended after {time.monotonic() - began:.1f} s, {end['exit_statuses']}, step {newest} is saved")
        if "first_step" in end and "twice" not in text:
            assert newest >= end["last_step"], (text, end)
    assert run.start(*texts).wait(600) == 0
    assert run.results() == expected


@pytest.mark.soak
def test_a_deadline_shorter_than_saving_keeps_the_last_checkpoint(tmp_path):
    expected = undisturbed(tmp_path, 1, 60)
    run = Run(tmp_path, 1, 60)
    supervised = run.start("term-supervisor@0:10:data", policy={"grace_seconds": 0.0})
    assert supervised.wait(120) == SupervisorExit.PREEMPTED
    assert supervised.kinds("end")[-1]["code"] == "killed"
    assert not left_running(run.folder)
    assert max(saved_steps(run.run_dir / "checkpoints")) % 4 == 0  # saved when due, not on request
    assert run.start().wait(600) == 0
    assert run.results() == expected
    assert all(path.name.isdecimal() or path.name == "GENERATION" for path in (run.run_dir / "checkpoints").iterdir())
