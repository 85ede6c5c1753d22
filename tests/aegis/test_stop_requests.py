"""Requests to stop, to whom and when ever: the run is saved, or the newest checkpoint kept, and resumes bitwise."""

import os
import signal
import time

import pytest

from tests.aegis.aegis_helpers import left_running, supervise_light
from tests.aegis.real_helpers import Run, undisturbed
from tests.lab.helpers import empty_state
from tests.train_helpers import compile_once, write_run
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.main import main
from zaya_jax.run.checkpoints import saved_steps
from zaya_jax.run.progress_record import NAME, SIZE, VARIABLE, Phase, ProgressRecord, read_progress
from zaya_jax.train import initialization, trainer

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


def test_a_signal_to_the_whole_group_stops_once(tmp_path):
    """As of systemd: the trainer gets the signal, and once more from the supervisor."""
    supervised = supervise_light(tmp_path, 5000, "group@3")
    assert supervised.wait() == SupervisorExit.PREEMPTED
    (end,) = supervised.kinds("end")
    assert (end["exit_statuses"], end["last_step"]) == ([143], int((tmp_path / "checkpoint-0").read_text()))


def test_the_trainer_saves_once_it_gets_a_signal_twice(tmp_path, monkeypatch, capsys):
    enter, sent = ProgressRecord.enter, []

    def interrupted(record, phase):
        enter(record, phase)
        if record.step == 6 and phase == Phase.DATA and not sent:
            sent.extend(os.kill(os.getpid(), signal.SIGTERM) for _ in range(2))

    compile_once(monkeypatch)
    monkeypatch.setattr(initialization, "init_state", empty_state)
    monkeypatch.setattr(trainer, "plot_run", lambda *_, **__: None)
    monkeypatch.setattr(ProgressRecord, "enter", interrupted)
    os.truncate(record := os.memfd_create(NAME), SIZE)
    monkeypatch.setenv(VARIABLE, f"/proc/{os.getpid()}/fd/{record}")
    overrides = ["phases.0.tokens=76800", "evaluation.every=5", "sample.tokens=0", "checkpoint.every=1000",
                 "model.num_layers=1", "model.attention=gqa", "model.router=linear", "model.residual_scaling=false",
                 "optimizer.matrices=adamw", "train.batch.micro_batch=4"]  # fmt: skip
    assert main(["--config", str(write_run(tmp_path)), *overrides]) == 143
    assert "saving after this step, then exiting.\n" in capsys.readouterr().err
    progress = read_progress(record)
    os.close(record)
    assert saved_steps(tmp_path / "run" / "checkpoints") == [progress.step]
    assert (progress.step, progress.exit_record.status) == (8, 143)
    assert {phase.name.lower() for phase in Phase if progress.longest[phase]} >= {
        "join", "open", "restore", "compile", "data", "dispatch", "device_wait", "evaluate", "save"}  # fmt: skip


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
