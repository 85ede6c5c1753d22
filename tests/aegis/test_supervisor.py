"""A supervisor restarts what fails, stops what cannot go on, and leaves nothing behind: real processes and signals."""

import json
import os
import signal
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from tests.aegis.aegis_helpers import LIGHT, QUICK, Supervised, check_events, left_running, supervise_light
from tests.train_helpers import ROOT
from zaya_jax.aegis import __main__ as command
from zaya_jax.aegis import job_state
from zaya_jax.aegis.__main__ import main
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.job_state import JobState
from zaya_jax.aegis.policy import Policy, TimeoutPolicy
from zaya_jax.aegis.timeouts import Timeouts
from zaya_jax.run.files import locked


def time_of(folder, fault):
    return float((folder / f"done-{fault.replace('@', '-')}").read_text())


def count_files(folder):
    """How many files the supervisor had open in each attempt, as a trainer noted."""
    counts: dict[int, int] = {}
    for line in (folder / "files").read_text().splitlines():
        trainer, count = map(int, line.split())
        counts[trainer] = min(count, counts.get(trainer, count))  # some are open for a moment
    return list(counts.values())


def test_a_process_that_ends_is_restarted_at_once(tmp_path):
    """And no attempt leaves a file open."""
    faults = ["SIGKILL@7", "SIGSEGV@12", "SIGABRT@17", "raise@22", "exit@27"]
    supervised = supervise_light(tmp_path, 30, "files@0!", *faults, policy={"restart": {"delays": [0.0]}})
    assert supervised.wait() == SupervisorExit.DONE
    check_events(supervised.events)
    ends = supervised.kinds("end")
    assert [(end["code"], end["first_step"], end["last_step"]) for end in ends] == [
        ("signal-SIGKILL", 0, 7), ("signal-SIGSEGV", 5, 12), ("signal-SIGABRT", 10, 17), ("exception", 15, 22),
        ("exit-1", 20, 27), ("finished", 25, 30),
    ]  # fmt: skip
    recoveries = supervised.kinds("recover")
    for fault, detected, recovered, end in zip(faults, supervised.faults, recoveries, ends[:-1], strict=True):
        assert time_of(tmp_path, fault) < detected["monotonic"] < recovered["monotonic"]
        assert recovered["cause"] == detected["id"] == end["cause"]
    counts = count_files(tmp_path)
    assert len(counts) == 6
    assert max(counts) <= counts[0] + 1, counts  # a file opened at the first failure
    assert not left_running(tmp_path)


def test_a_process_that_hangs_is_found_and_its_stacks_are_kept(tmp_path):
    faults = ["wait@7:1", "SIGSTOP@12:1", "lock@17:1"]  # the last one ends when the stack is asked for
    waits = ["wait@60:0", "wait@80:0", "wait@100:0"]  # later, so that the files for process 0 are open too
    supervised = supervise_light(tmp_path, 110, "files@0:1!", *waits, *faults, processes=2,
                                 policy={"restart": {"delays": [0.0]}, "timeouts": QUICK})  # fmt: skip
    assert supervised.wait() == SupervisorExit.DONE
    check_events(supervised.events)
    kills = [event for event in supervised.kinds("act") if event["code"] == "kill"]
    for fault, detected, kill in zip(faults, supervised.faults, kills, strict=True):
        assert (detected["code"], detected["rank"]) == ("hang", 1)
        assert time_of(tmp_path, fault) < detected["monotonic"]
        assert 2.0 == detected["seconds"]["timeout"] < detected["seconds"]["detect"]
        files = {name.rpartition("/")[2]: (supervised.folder / name).read_text() for name in kill["files"]}
        if not fault.startswith("SIGSTOP"):  # a stopped process cannot print
            assert "in happen" in files["process-1.stderr"]
        else:
            assert "stopped by a signal" in detected["text"]
        assert "State:" in files["process-1.kernel"]
    counts = count_files(tmp_path)
    assert len(counts) == 4
    assert max(counts) <= counts[0] + 1, counts  # the probe of GPUs can have a file open


def test_the_process_that_failed_is_told_from_those_that_follow(tmp_path):
    supervised = supervise_light(tmp_path, 60, "raise@7:1", processes=3)
    assert supervised.wait() == SupervisorExit.DONE
    end = supervised.kinds("end")[0]
    assert (end["rank"], end["code"], end["text"]) == (1, "exception", "ValueError: a bad value (model.py:7 in loss)")


def test_the_same_failure_at_the_same_step_is_not_tried_forever_and_people_are_told(tmp_path):
    news, command = tmp_path / "news", tmp_path / "tell"
    command.write_text(f"#!/bin/sh\ncat >> {news}\n")
    command.chmod(0o755)
    supervised = supervise_light(tmp_path, 12, "raise@7!", policy={"notify": {"command": [str(command)]}})
    assert supervised.wait() == SupervisorExit.DO_NOT_REQUEUE
    assert supervised.verdict["exit_code"] == 93
    assert supervised.verdict["attempts"] == 2
    assert "deterministic: ValueError: a bad value" in supervised.verdict["why"]
    told = [json.loads(line) for line in news.read_text().splitlines()]
    assert {event["kind"] for event in told} >= {"detect", "end", "act"}
    assert "exit-do_not_requeue" in {event["code"] for event in told}
    assert {event["severity"] for event in told} <= {"error", "fatal"}


@pytest.mark.parametrize(("limit", "code", "attempts"), [
    ({"no_progress": 2}, SupervisorExit.DO_NOT_REQUEUE, 4),  # the first made progress, and two more are allowed
    ({"per_hour": 1}, SupervisorExit.BUDGET_SPENT, 2),
])  # fmt: skip
def test_a_process_that_is_killed_again_and_again_is_given_up(tmp_path, limit, code, attempts):
    supervised = supervise_light(tmp_path, 12, "SIGKILL@7!", policy={"restart": {"delays": [0.0], **limit}})
    assert supervised.wait() == code
    assert (supervised.verdict["exit_code"], supervised.verdict["attempts"]) == (code, attempts)


def test_bad_input_ends_at_once(tmp_path):
    supervised = supervise_light(tmp_path, 12, "input@0!")
    assert supervised.wait() == SupervisorExit.CONFIGURATION
    assert supervised.verdict["attempts"] == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 85), (signal.SIGINT, 130), (signal.SIGHUP, 85)])
def test_a_request_to_stop_is_passed_on_and_the_trainer_saves(tmp_path, number, code):
    processes = 2 if number == signal.SIGTERM else 1
    supervised = supervise_light(tmp_path, 5000, processes=processes)
    for process in range(processes):
        supervised.wait_for(tmp_path / f"checkpoint-{process}")
    supervised.process.send_signal(number)
    assert supervised.wait() == code
    (end,) = supervised.kinds("end")
    assert int((tmp_path / "checkpoint-0").read_text()) == end["last_step"]
    assert end["fault"] == "preemption"
    assert supervised.faults == []
    assert not left_running(tmp_path)


def test_a_signal_to_the_trainer_alone_ends_the_job_as_preempted(tmp_path):
    supervised = supervise_light(tmp_path, 5000, "SIGTERM@3")
    assert supervised.wait() == SupervisorExit.PREEMPTED
    assert (tmp_path / "checkpoint-0").exists()


@pytest.mark.parametrize("second", [True, False])
def test_a_trainer_that_does_not_stop_is_killed(tmp_path, second):
    supervised = supervise_light(tmp_path, 5000, "deaf@3", policy={"grace_seconds": 600.0 if second else 0.5})
    supervised.wait_for(tmp_path / "done-deaf-3")
    supervised.process.send_signal(signal.SIGTERM)
    if second:
        while not supervised.kinds("act"):  # of signals at once, the lower number would be the first
            assert supervised.process.poll() is None
            time.sleep(0.01)
        supervised.process.send_signal(signal.SIGINT)
    assert supervised.wait() == SupervisorExit.PREEMPTED
    assert supervised.kinds("end")[0]["code"] == "killed"
    assert not left_running(tmp_path)


def test_signals_within_a_second_are_one_request_but_for_ctrl_c(tmp_path, monkeypatch):
    shared, now = JobState(tmp_path, "node", Policy(), Timeouts(TimeoutPolicy(), tmp_path, "")), [10.0]
    monkeypatch.setattr(job_state, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for now[0], number in ((10.0, 15), (10.9, 15), (11.2, 15), (11.3, 1), (11.4, 2), (11.5, 2), (12.3, 1)):
        shared.note_signal(number)
    assert shared.signals == [15, 15, 2, 2]
    shared.log.close()


def test_the_lock_that_a_dead_supervisor_left_at_a_file_server_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "_LEASE", 1.5, raising=False)
    monkeypatch.setattr(command, "Supervisor", lambda *_: SimpleNamespace(run=lambda: SupervisorExit.DONE))
    arguments = ["run", "--run-dir", str(tmp_path), "--", "true"]
    with locked(tmp_path / "aegis" / os.uname().nodename / ".lock"):
        assert main(arguments) == SupervisorExit.RETRY_ELSEWHERE
    held = ExitStack()
    held.enter_context(locked(tmp_path / "aegis" / os.uname().nodename / ".lock"))
    threading.Timer(0.5, held.close).start()
    assert main(arguments) == SupervisorExit.DONE


def test_nothing_outlives_the_supervisor_and_its_command_resumes(tmp_path):
    """Nor does a trainer behind a shell that waits for it."""
    command = ["sh", "-c", '"$@"; exit $?', "sh", sys.executable, str(LIGHT), str(tmp_path)]
    supervised = Supervised(tmp_path, [*command, "5000"], 2)
    for process in range(2):
        supervised.wait_for(tmp_path / f"checkpoint-{process}")
    assert len(left_running(tmp_path)) == 5
    second = Supervised(tmp_path, ["true"])
    assert second.wait() == SupervisorExit.CONFIGURATION
    assert "in use by another process" in second.said
    supervised.process.send_signal(signal.SIGKILL)
    supervised.wait()
    deadline = time.monotonic() + 60
    while left_running(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left_running(tmp_path)
    step = int((tmp_path / "checkpoint-0").read_text())
    partial = supervised.folder / f"state.json.{'0' * 16}.partial"
    partial.touch()
    again = Supervised(tmp_path, [*command, str(step + 5)], 2)  # as a scheduler starts it
    assert again.wait() == SupervisorExit.DONE
    assert not partial.exists()
    assert again.kinds("end")[-1]["first_step"] == step


def test_children_of_the_trainer_are_ended_with_it(tmp_path):
    supervised = supervise_light(tmp_path, 12, "child@3", environment={"DRILL_FOLDER": str(tmp_path)})
    assert supervised.wait() == SupervisorExit.DONE
    assert not left_running(tmp_path)


def test_a_paused_supervisor_kills_nothing_and_imports_nothing_of_the_trainer(tmp_path):
    supervised = supervise_light(tmp_path, 400, policy={"timeouts": QUICK})
    supervised.wait_for(tmp_path / "checkpoint-0")
    maps = Path(f"/proc/{supervised.process.pid}/maps").read_text()
    supervised.process.send_signal(signal.SIGSTOP)
    time.sleep(3.0)  # longer than the timeouts; meanwhile a full pipe may also stop the trainer
    supervised.process.send_signal(signal.SIGCONT)
    assert supervised.wait() == SupervisorExit.DONE
    assert not supervised.faults
    assert not [name for name in ("jaxlib", "numpy") if name in maps]


def test_a_flood_of_output_costs_no_memory_and_is_passed_on_unchanged(tmp_path):
    supervised = supervise_light(tmp_path, 12, "flood@3", "endless@5")
    process, most = psutil.Process(supervised.process.pid), 0
    while supervised.process.poll() is None:
        try:
            most = max(most, process.memory_info().rss)
        except psutil.NoSuchProcess:
            break
        time.sleep(0.01)
    assert supervised.wait() == SupervisorExit.DONE
    assert most < 60e6, most
    assert all(event["text"].isprintable() for event in supervised.events)
    with (tmp_path / "out").open("rb") as out:
        assert out.read(5) == b"\x1b[31m"


def test_nobody_has_to_read_the_output(tmp_path):
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "zaya_jax.aegis", "run", "--run-dir", str(tmp_path / "run"), "--", sys.executable,
               str(LIGHT), str(tmp_path), "12", "spill@3"]  # fmt: skip
    process = psutil.Popen(command, stdout=writer, stderr=writer, cwd=ROOT)
    os.close(writer)
    assert process.wait(60) == SupervisorExit.DONE
    assert os.read(reader, 5).startswith(b"\x1b[31m")
    os.close(reader)


def test_a_command_that_does_not_exist_is_named(tmp_path, capsys):
    assert main(["run", "--run-dir", str(tmp_path), "--", "no-such-command"]) == SupervisorExit.CONFIGURATION
    said = capsys.readouterr().err
    assert "no-such-command" in said
    assert said.count("\n") == 1


def test_a_command_without_a_progress_record_is_left_to_run(tmp_path):
    supervised = Supervised(tmp_path, ["sleep", "2"], policy={"timeouts": {"start": 0.5}})
    assert supervised.wait() == SupervisorExit.DONE
    assert supervised.faults == []


def test_a_signal_that_is_ignored_stays_ignored(tmp_path):
    """As after `nohup`, whose terminal has gone."""
    tmp_path.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "zaya_jax.aegis", "run", "--run-dir", str(tmp_path / "run"), "--", sys.executable,
               str(LIGHT), str(tmp_path), "200"]  # fmt: skip
    process = psutil.Popen(["sh", "-c", 'trap "" HUP; exec "$@"', "sh", *command], cwd=ROOT)
    while not (tmp_path / "checkpoint-0").exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGHUP)
    assert process.wait(60) == SupervisorExit.DONE


@pytest.mark.parametrize(("flags", "named"), [
    (["--nonsense"], "--nonsense"), (["--", sys.executable, "-m", "zaya_jax.main", "--nonsense"], "--config"),
])  # fmt: skip
def test_a_flag_that_does_not_exist_is_bad_configuration(flags, named, capsys):
    assert main(["run", *flags]) == SupervisorExit.CONFIGURATION
    assert named in capsys.readouterr().err
