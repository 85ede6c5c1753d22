"""A trainer behind other programs is supervised by its record, whatever they do with its status and its session."""

import errno
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.aegis.aegis_helpers import LIGHT, QUICK, Supervised, left_running
from tests.train_helpers import CONFIG
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.failure import FaultClass, find_failure
from zaya_jax.aegis.output import Output
from zaya_jax.aegis.processes import Rank
from zaya_jax.config import to_yaml

PIPE = ["sh", "-c", '"$@" 2>&1 | cat', "sh"]
WRAPPERS = {
    "pipe": PIPE, "session": ["setsid", "--wait"], "timeout": ["timeout", "600"], "nohup": ["nohup"],
    "two shells": ["sh", "-c", 'sh -c \'"$@"; exit $?\' sh "$@"; exit 7', "sh"],
}  # fmt: skip


def supervise(folder, wrapper, steps, *faults, processes=1, **options):
    folder.mkdir(parents=True, exist_ok=True)
    command = [*wrapper, sys.executable, str(LIGHT), str(folder), str(steps), *faults]
    return Supervised(folder, command, processes, **options)


def test_a_trainer_that_dies_behind_a_pipe_is_restarted(tmp_path):
    """The pipe returns 0, and so does one of the trainers."""
    policy = {"restart": {"delays": [0.0]}}
    supervised = supervise(tmp_path, PIPE, 30, "SIGKILL@7:1", "quit@17:1", processes=2, policy=policy)
    assert supervised.wait() == SupervisorExit.DONE
    ends = supervised.kinds("end")
    assert [(end["code"], end.get("rank"), end["exit_statuses"][end.get("rank", 0)]) for end in ends] == [
        ("no-exit-record", 1, 0), ("no-exit-record", 1, 0), ("finished", None, 0)
    ]  # fmt: skip
    assert ends[-1]["last_step"] == 30


@pytest.mark.parametrize(("after", "status"), [("exit 9", 9), (f"{sys.executable} -m zaya_jax.main --no-such", 2)])
def test_what_fails_after_the_trainer_has_finished_is_said_and_restarts_nothing(tmp_path, after, status):
    supervised = supervise(tmp_path, ["sh", "-c", f'"$@"; {after}', "sh"], 12)
    assert supervised.wait() == SupervisorExit.DONE
    assert supervised.verdict["why"] == ("The command finished in attempt 1. Process 0 finished, and then its command "
                                         f"ended with status {status}.")  # fmt: skip
    assert supervised.faults == []


def test_a_script_that_runs_on_is_ended_if_its_trainer_failed_and_left_alone_if_it_finished(tmp_path):
    script = [
        "sh",
        "-c",
        '"$@"; [ -e "$3/go-on" ] && { touch "$3/go-on"; sleep 3; exit; }; touch "$3/go-on"; sleep 300',
    ]
    policy = {"timeouts": {**QUICK, "end": 1.0}, "restart": {"delays": [0.0]}}
    supervised = supervise(tmp_path, [*script, "sh"], 20, "SIGKILL@7", policy=policy)
    assert supervised.wait() == SupervisorExit.DONE
    ends = supervised.kinds("end")
    assert [(end["code"], end["exit_statuses"]) for end in ends] == [("no-exit-record", [-9]), ("finished", [0])]
    assert len(supervised.faults) == 1


@pytest.mark.parametrize("name", [
    "pipe", "session", *(pytest.param(name, marks=pytest.mark.soak) for name in ("timeout", "nohup", "two shells")),
])  # fmt: skip
def test_a_request_to_stop_reaches_the_trainer_itself(tmp_path, name):
    supervised = supervise(tmp_path, WRAPPERS[name], 5000)
    supervised.wait_for(tmp_path / "checkpoint-0")
    supervised.process.send_signal(signal.SIGTERM)
    assert supervised.wait() == SupervisorExit.PREEMPTED
    (end,) = supervised.kinds("end")
    assert (end["fault"], end["code"]) == ("preemption", "exit-143")
    assert int((tmp_path / "checkpoint-0").read_text()) == end["last_step"]
    assert not left_running(tmp_path)


def test_a_trainer_may_save_after_a_signal_has_ended_the_shell_around_it(tmp_path):
    """As after SIGTERM to all processes of a control group."""
    supervised = supervise(tmp_path, PIPE, 5000, "slow@3", "group@7")
    assert supervised.wait() == SupervisorExit.PREEMPTED
    (end,) = supervised.kinds("end")
    assert (end["code"], end["exit_statuses"]) == ("exit-143", [-15])
    assert int((tmp_path / "checkpoint-0").read_text()) == end["last_step"] == 8
    assert not left_running(tmp_path)


def test_a_trainer_that_hangs_in_another_session_is_found_and_killed(tmp_path):
    supervised = supervise(tmp_path, WRAPPERS["session"], 20, "wait@7", policy={"timeouts": QUICK})
    assert supervised.wait() == SupervisorExit.DONE
    assert [end["code"] for end in supervised.kinds("end")] == ["hang-dispatch", "finished"]
    assert not left_running(tmp_path)


def test_a_run_is_not_finished_before_its_last_step_is_saved(tmp_path):
    """Whatever its processes say: the run folder has a configuration, but no checkpoint."""
    (tmp_path / "run").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(CONFIG))
    supervised = supervise(tmp_path, PIPE, 12, policy={"restart": {"delays": [0.0]}})
    assert supervised.wait() == SupervisorExit.DO_NOT_REQUEUE
    assert [end["code"] for end in supervised.kinds("end")] == ["not-saved"] * 2
    assert "the last step is not saved" in supervised.verdict["why"]


SCRIPTS = {
    "a retry loop": ('until "$@"; do sleep 0.1; done', SupervisorExit.DONE),
    "another command": ('"$@"; $PYTHON -m zaya_jax.main --help', SupervisorExit.DO_NOT_REQUEUE),
    "another run": ('"$@"; $PYTHON $LIGHT $OTHER 20', SupervisorExit.DO_NOT_REQUEUE),
    "no trainer": ("no_such_python -m zaya_jax.main 2>&1 | cat", SupervisorExit.DO_NOT_REQUEUE),
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_has_finished_when_every_run_that_it_trains_has(tmp_path, monkeypatch, name):
    """Its only process is killed in each attempt; the shell returns 0."""
    script, code = SCRIPTS[name]
    for variable, value in {"PYTHON": sys.executable, "LIGHT": LIGHT, "OTHER": tmp_path / "other"}.items():
        monkeypatch.setenv(variable, str(value))
    (tmp_path / "other").mkdir()
    policy = {"restart": {"delays": [0.0], "no_progress": 1}, "settle_seconds": 5.0}
    once = "" if name == "a retry loop" else "!"  # `!`: each time
    supervised = supervise(tmp_path / "run", ["sh", "-c", script, "sh"], 40, f"SIGKILL@7{once}", policy=policy)
    assert supervised.wait() == code


FORGED = """
import os, sys, time
from zaya_jax.run.progress_record import Phase, record_from_environment
record = record_from_environment()
record._pid = int(sys.argv[1])
record.enter(Phase.DATA)
print("ready", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("pid", ["other", 2**32 - 1, 0])
def test_a_record_that_names_a_process_of_others_is_not_believed(tmp_path, pid):
    """No signal is sent to a process that was not started with the record."""
    other = Rank(1, (["sleep", "60"], {}), [Output(1), Output(2)])
    named = other.process.pid if pid == "other" else pid
    command = [sys.executable, "-c", FORGED, str(named)]
    rank = Rank(0, (command, {"PYTHONPATH": ":".join(sys.path)}), [Output(1), Output(2)])
    try:
        while rank.streams[0].last_lines != [b"ready"] and not rank.streams[0].read():
            assert rank.process.poll() is None
        assert rank.progress is None
        rank.send(signal.SIGTERM)
        assert rank.note_end(60).status == -signal.SIGTERM
        assert other.process.poll() is None
    finally:
        for each in (rank, other):
            each.kill()
            each.close()


ENDS = "from zaya_jax.run.progress_record import Phase, record_from_environment as r; r().enter(Phase.DATA)"


def test_the_command_itself_is_believed_though_its_environment_cannot_be_read(monkeypatch):
    command = [sys.executable, "-c", f"{ENDS}; import time; time.sleep(60)"]
    rank = Rank(0, (command, {"PYTHONPATH": ":".join(sys.path)}), [Output(1), Output(2)])
    monkeypatch.setattr(Path, "read_bytes", lambda path: os.open("", os.O_RDONLY))  # an `OSError`
    try:
        deadline = time.monotonic() + 30
        while rank.progress is None:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        rank.kill()
        rank.note_end(60)
        rank.close()


def test_a_signal_reaches_a_command_whose_trainer_has_ended_and_was_not_waited_for():
    command = ["sh", "-c", '"$@" & exec sleep 60', "sh", sys.executable, "-c", f"{ENDS}; import time; time.sleep(1)"]
    rank = Rank(0, (command, {"PYTHONPATH": ":".join(sys.path)}), [Output(1), Output(2)])
    try:
        while not rank.outlives_trainer:
            assert rank.process.poll() is None
            _ = rank.progress
        rank.send(signal.SIGTERM)
        assert rank.note_end(60).status == -signal.SIGTERM
    finally:
        rank.kill()
        rank.close()


def test_a_command_that_is_killed_for_its_lost_trainer_has_crashed_though_it_starts_another_one_meanwhile(tmp_path):
    first, second = "import os; time.sleep(1); os._exit(1)", "time.sleep(60)"
    again = f'"$@" "{first}"; until [ -e {tmp_path}/go ]; do sleep 0.1; done; exec "$@" "{second}"'
    code = f"import sys, time; {ENDS}; exec(sys.argv[1])"
    command = ["sh", "-c", again, "sh", sys.executable, "-c", code]
    rank = Rank(0, (command, {"PYTHONPATH": ":".join(sys.path)}), [Output(1), Output(2)])
    try:
        while not rank.has_lost_trainer:
            _ = rank.progress
        rank.is_lost = True
        (tmp_path / "go").touch()
        while rank.has_lost_trainer:
            _ = rank.progress
        rank.kill()
        failure = find_failure([rank.note_end(60)], [])
        assert failure is not None
        assert failure.fault is FaultClass.CRASH
    finally:
        rank.kill()
        rank.close()


def test_a_command_that_started_as_the_last_descriptor_was_used_is_not_left_running(monkeypatch):
    started = []

    def refuse(pid):
        started.append(psutil.Process(pid))
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        Rank(0, (["sleep", "60"], {}), [Output(1), Output(2)])
    assert not started[0].is_running()
