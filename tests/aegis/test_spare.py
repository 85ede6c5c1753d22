"""A spare: its preflight is the real one, on this machine's processor."""

import os
import sys
import time
from types import SimpleNamespace

import psutil
import pytest

from tests.train_helpers import write_run
from zaya_jax.aegis import spare
from zaya_jax.aegis.events import EVENTS, read_events
from zaya_jax.aegis.job_state import JobState
from zaya_jax.aegis.policy import Policy
from zaya_jax.aegis.spare import Spare
from zaya_jax.aegis.timeouts import Timeouts
from zaya_jax.aegis.training_command import TrainingCommand, read_command


@pytest.fixture
def job(tmp_path) -> JobState:
    made = JobState(tmp_path, "node", Policy(), Timeouts(Policy().timeouts, tmp_path, "command"))
    made.said = []
    made.member = SimpleNamespace(is_idle_spare=True, note=lambda **changes: made.said.append(changes["unfit"]))
    return made


def keep(job: JobState, environment: dict[str, str], command: TrainingCommand) -> Spare:
    """Keep a spare until it has told the leader whether it can train."""
    kept, deadline = Spare(job, {**os.environ, **environment}), time.monotonic() + 120
    while not job.said:
        kept.keep(command)
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return kept


@pytest.mark.parametrize(
    "launcher",
    [
        {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_SIZE": "3"},
        {"KUBERNETES_SERVICE_HOST": "192.0.2.1", "JOB_COMPLETION_INDEX": "2"},
    ],
)
def test_a_spare_that_passes_its_preflight_starts_processes_on_standby(tmp_path, job, launcher):
    command = read_command([sys.executable, "-m", "zaya_jax.main", str(write_run(tmp_path))], 1, None)
    kept = keep(job, launcher, command)
    assert job.said == [""]
    kept.keep(command)
    running = [each for each in psutil.Process().children() if each.status() != psutil.STATUS_ZOMBIE]
    (standby,) = [each for each in running if "zaya_jax.main" in each.cmdline()]
    standby.kill()
    while not job.said[1:]:
        kept.keep(command)
        time.sleep(0.02)
    assert job.said == ["", ""]  # it can replace a node without standby
    kept.keep(command)
    assert kept._group is None
    assert job.log.close()
    (event,) = read_events(tmp_path / EVENTS)
    assert (event["code"], event["text"][:29]) == ("standby-ended", "Standby ended with status -9:")


def test_a_check_that_is_killed_names_its_status(job, tmp_path, monkeypatch):
    monkeypatch.setattr(TrainingCommand, "preflight", lambda _: (["sh", "-c", "kill -9 $$"], {}))
    keep(job, {}, TrainingCommand(("true",), tmp_path))
    assert job.said == ["The preflight of this spare ended with status -9: it printed nothing."]


def test_a_machine_that_cannot_start_a_process_is_tried_again_later(job, tmp_path, monkeypatch):
    tries = []
    monkeypatch.setattr(TrainingCommand, "preflight", lambda _: tries.append(0) or ([str(tmp_path / "absent")], {}))
    kept = Spare(job, dict(os.environ))
    for _ in range(3):
        kept.keep(TrainingCommand(("true",), tmp_path))
    assert len(tries) == 1


@pytest.mark.parametrize(
    ("environment", "seconds", "text"),
    [
        ({"JAX_PLATFORMS": "absent"}, 120.0, "The preflight of this spare ended with status 2: "),
        ({}, 0.1, "The preflight of this spare did not end within 0.1 s: "),
    ],
)
def test_a_spare_that_fails_its_preflight_says_why_and_waits_before_the_next(
    tmp_path, job, monkeypatch, environment, seconds, text
):
    monkeypatch.setattr(spare, "_LONGEST", seconds)
    command = read_command([sys.executable, "-m", "zaya_jax.main", str(write_run(tmp_path))], 1, None)
    kept = keep(job, environment, command)
    assert job.said[0].startswith(text)
    assert ("absent" in job.said[0]) == ("JAX_PLATFORMS" in environment)
    kept.keep(command)
    assert kept._group is None
    assert job.log.close()
    assert [event["code"] for event in read_events(tmp_path / EVENTS)] == ["spare-unfit"]
