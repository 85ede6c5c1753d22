"""A supervisor restarts what fails, stops what cannot go on, and leaves nothing behind: real processes and signals."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.aegis.aegis_helpers import LIGHT, Supervised, left_running, supervise_light
from tests.train_helpers import ROOT
from zaya_jax.aegis.exit_codes import SupervisorExit


def time_of(folder, fault):
    return float((folder / f"done-{fault.replace('@', '-')}").read_text())


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        ("SIGKILL@7", "signal-SIGKILL"),
        ("SIGSEGV@7", "signal-SIGSEGV"),
        ("SIGABRT@7", "signal-SIGABRT"),
        ("raise@7", "exception"),
        ("exit@7", "exit-1"),
    ],
)
def test_a_process_that_ends_is_restarted_at_once(tmp_path, fault, code):
    supervised = supervise_light(tmp_path, 12, fault)
    assert supervised.wait() == SupervisorExit.DONE
    (detected,), (recovered,) = supervised.faults, supervised.kinds("recover")
    ends = supervised.kinds("end")
    assert [end["code"] for end in ends] == [code, "finished"]
    assert (ends[0]["first_step"], ends[0]["last_step"], ends[1]["first_step"], ends[1]["last_step"]) == (0, 7, 5, 12)
    assert detected["monotonic"] - time_of(tmp_path, fault) < 5
    assert recovered["cause"] == detected["id"] == ends[0]["cause"]
    assert not left_running(tmp_path)


@pytest.mark.parametrize("fault", ["wait@7:1", "lock@7:1", "SIGSTOP@7:1"])
def test_a_process_that_hangs_is_found_and_its_stacks_are_kept(tmp_path, fault):
    supervised = supervise_light(tmp_path, 40, fault, processes=2)
    assert supervised.wait() == SupervisorExit.DONE
    (detected,) = supervised.faults
    assert (detected["code"], detected["rank"]) == ("hang", 1)
    assert 1.0 <= detected["monotonic"] - time_of(tmp_path, fault) < 6  # the timeout is 1 s; drills measure the rest
    (kill,) = [event for event in supervised.kinds("act") if event["code"] == "kill"]
    files = {name.rpartition("/")[2]: (supervised.folder / name).read_text() for name in kill["files"]}
    if not fault.startswith("SIGSTOP"):  # a stopped process cannot print
        assert "in happen" in files["process-1.stderr"]
    else:
        assert "stopped by a signal" in detected["text"]
    assert "State:" in files["process-1.kernel"]


def test_the_process_that_failed_is_told_from_those_that_follow(tmp_path):
    supervised = supervise_light(tmp_path, 60, "raise@7:1", processes=3)
    assert supervised.wait() == SupervisorExit.DONE
    end = supervised.kinds("end")[0]
    assert (end["rank"], end["code"], end["text"]) == (1, "exception", "ValueError: a bad value (model.py:7 in loss)")


def test_the_same_failure_at_the_same_step_is_not_tried_forever(tmp_path):
    supervised = supervise_light(tmp_path, 12, "raise@7!")
    assert supervised.wait() == SupervisorExit.DO_NOT_REQUEUE
    assert supervised.verdict["exit_code"] == 93
    assert supervised.verdict["attempts"] == 2
    assert "deterministic: ValueError: a bad value" in supervised.verdict["why"]


def test_a_process_that_is_killed_without_progress_is_given_up(tmp_path):
    supervised = supervise_light(tmp_path, 12, "SIGKILL@7!", policy={"restart": {"delays": [0.0], "no_progress": 3}})
    assert supervised.wait() == SupervisorExit.DO_NOT_REQUEUE
    assert supervised.verdict["attempts"] == 5  # the first made progress, and three more are allowed


def test_the_budget_of_restarts_is_kept(tmp_path):
    faults = [f"SIGKILL@{step}" for step in range(6, 30, 6)]
    supervised = supervise_light(tmp_path, 40, *faults, policy={"restart": {"delays": [0.0], "per_hour": 3}})
    assert supervised.wait() == SupervisorExit.BUDGET_SPENT
    assert supervised.verdict["attempts"] == 4


def test_bad_input_ends_at_once(tmp_path):
    supervised = supervise_light(tmp_path, 12, "input@0!")
    assert supervised.wait() == SupervisorExit.CONFIGURATION
    assert supervised.verdict["attempts"] == 1


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 85), (signal.SIGINT, 130), (signal.SIGHUP, 85)])
def test_a_request_to_stop_is_passed_on_and_the_trainer_saves(tmp_path, number, code):
    supervised = supervise_light(tmp_path, 5000, processes=2)
    for process in range(2):
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
    supervised = supervise_light(tmp_path, 5000, "deaf@3", policy={"grace_seconds": 60.0 if second else 0.5})
    supervised.wait_for(tmp_path / "done-deaf-3")
    supervised.process.send_signal(signal.SIGTERM)
    if second:
        for seconds in (0.3, 2.0):  # two within a second are one request
            time.sleep(seconds)
            assert supervised.process.poll() is None
            supervised.process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    assert supervised.wait() == SupervisorExit.PREEMPTED
    assert time.monotonic() - began < 20
    assert supervised.kinds("end")[0]["code"] == "killed"
    assert not left_running(tmp_path)


@pytest.mark.parametrize("shell", [False, True])
def test_nothing_outlives_the_supervisor_and_its_command_resumes(tmp_path, shell):
    """Nor does a trainer behind a shell that waits for it."""
    script = [sys.executable, str(LIGHT), str(tmp_path)]
    command = ["sh", "-c", '"$@"; exit $?', "sh", *script] if shell else script
    supervised = Supervised(tmp_path, [*command, "5000"], 2)
    for process in range(2):
        supervised.wait_for(tmp_path / f"checkpoint-{process}")
    assert len(left_running(tmp_path)) == (5 if shell else 3)
    supervised.process.send_signal(signal.SIGKILL)
    supervised.wait()
    deadline = time.monotonic() + 1.0
    while left_running(tmp_path) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not left_running(tmp_path)
    step = int((tmp_path / "checkpoint-0").read_text())
    again = Supervised(tmp_path, [*command, str(step + 5)], 2)  # as a scheduler starts it
    assert again.wait() == SupervisorExit.DONE
    assert again.kinds("end")[-1]["first_step"] == step


def test_children_of_the_trainer_are_ended_with_it(tmp_path):
    supervised = supervise_light(tmp_path, 12, "child@3", environment={"DRILL_FOLDER": str(tmp_path)})
    assert supervised.wait() == SupervisorExit.DONE
    assert not left_running(tmp_path)


def test_a_paused_supervisor_kills_nothing(tmp_path):
    supervised = supervise_light(tmp_path, 400)
    supervised.wait_for(tmp_path / "checkpoint-0")
    supervised.process.send_signal(signal.SIGSTOP)
    time.sleep(2.0)  # longer than the timeouts; meanwhile a full pipe may also stop the trainer
    supervised.process.send_signal(signal.SIGCONT)
    assert supervised.wait() == SupervisorExit.DONE
    assert not supervised.faults


@pytest.mark.parametrize("fault", ["flood@3", "endless@3"])
def test_a_flood_of_output_costs_no_memory(tmp_path, fault):
    supervised = supervise_light(tmp_path, 12, fault)
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


def test_output_is_passed_on_unchanged_and_nobody_has_to_read_it(tmp_path):
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "zaya_jax.aegis", "run", "--run-dir", str(tmp_path / "run"), "--", sys.executable,
               str(LIGHT), str(tmp_path), "12", "flood@3"]  # fmt: skip
    process = psutil.Popen(command, stdout=writer, stderr=writer)
    os.close(writer)
    assert process.wait(60) == SupervisorExit.DONE
    assert os.read(reader, 5).startswith(b"\x1b[31m")
    os.close(reader)


def test_two_supervisors_of_one_run_are_refused(tmp_path):
    first = supervise_light(tmp_path, 5000)
    first.wait_for(tmp_path / "checkpoint-0")
    second = Supervised(tmp_path, ["true"])
    assert second.wait() == SupervisorExit.CONFIGURATION
    assert "in use by another process" in second.said
    first.process.terminate()
    assert first.wait() == SupervisorExit.PREEMPTED


def test_a_command_that_does_not_exist_is_named(tmp_path):
    supervised = Supervised(tmp_path, ["no-such-command"])
    assert supervised.wait() == SupervisorExit.CONFIGURATION
    assert "no-such-command" in supervised.said
    assert supervised.said.count("\n") == 1


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


@pytest.mark.parametrize("flags", [["--nonsense"], ["--", sys.executable, "-m", "zaya_jax.main", "--nonsense"]])
def test_a_flag_that_does_not_exist_is_bad_configuration(flags):
    done = subprocess.run([sys.executable, "-m", "zaya_jax.aegis", "run", *flags], cwd=ROOT, capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert done.returncode == SupervisorExit.CONFIGURATION
    assert "--nonsense" in done.stderr or "--config" in done.stderr
