"""Drills: what is trained through faults is, bit for bit, what is trained without."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.aegis.aegis_helpers import Supervised
from tests.aegis.drilled_trainer import SITE
from tests.train_helpers import ROOT, write_run
from zaya_jax.aegis.drill import CRASHES, HANGS, Drill, draw_faults, format_card, score
from zaya_jax.aegis.faults import Fault, parse_fault
from zaya_jax.aegis.supervision_report import format_report, format_status
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.manifest import read_manifest
from zaya_jax.run.progress_record import Phase

STEPS = 20
TRAINER = ["train.batch.micro_batch=4", "checkpoint.every=4", "evaluation.every=15", "sample.tokens=4"]


def drill(folder: Path, faults: list[Fault], processes: int, steps: int = STEPS) -> dict:
    arguments = ["--config", str(write_run(folder)), *TRAINER, f"phases.0.tokens={steps * 128}"]
    if processes > 1:
        arguments.append("train.batch.micro_batch=2")
    card = Drill(folder / "drill", arguments, processes, faults, 3.0).run(print)
    print(format_card(card))
    assert not [*(folder / "drill" / "disturbed").glob("*.partial")], "what killed processes were writing is removed"
    return card


def check(card: dict) -> None:
    assert card["identical"]
    assert card["made"] == card["faults"]
    assert card["attempts"] == card["faults"] + 1
    assert card["false_alarms"] == 0
    assert card["attributed"] == 1, card["missed"]


def test_a_run_that_is_killed_and_hangs_ends_as_one_that_is_not(tmp_path, monkeypatch):
    """The trainer is a light one; the tests that follow take the real one."""
    (tmp_path / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    card = drill(tmp_path, [Fault("sigkill", 0, 6, Phase.DATA), Fault("wait", 0, 11, Phase.DISPATCH)], 1)
    check(card)
    report = format_report(tmp_path / "drill" / "disturbed")
    assert "crash: signal-SIGKILL of process 0 after step 6 -> restart, training again after" in report
    assert "ended with exit code 0 (finished); 2 faults" in format_status(tmp_path / "drill" / "disturbed")


@pytest.mark.soak
@pytest.mark.parametrize("process", [0, 1])
def test_every_fault_of_the_catalogue_is_survived(tmp_path, process):
    phases = [Phase.DATA, Phase.DISPATCH, Phase.SAVE, Phase.EVALUATE, Phase.DEVICE_WAIT]
    faults = [Fault(name, process, 3 + 2 * index, phases[index % 5]) for index, name in enumerate(CRASHES)]
    faults += [Fault("sigkill", process, 0, phase) for phase in (Phase.OPEN, Phase.RESTORE, Phase.COMPILE)]
    faults += [Fault(name, process, 20 + 3 * index, Phase.DATA) for index, name in enumerate(HANGS)]
    check(drill(tmp_path, faults, 2, steps=40))


@pytest.mark.soak
def test_random_faults_of_two_processes_are_survived(tmp_path):
    check(drill(tmp_path, draw_faults(12, 2, 60, 4, random.Random()), 2, steps=60))


BAD_LOSS = """
import runpy, sys
from zaya_jax.run.progress_record import ProgressRecord
complete_step = ProgressRecord.complete_step
def complete_badly(self, step, loss, grad_norm):
    bad = 12 <= step and not any(text.startswith("data.skip_rows") for text in sys.argv)
    complete_step(self, step, float("inf") if bad else loss, grad_norm)
ProgressRecord.complete_step = complete_badly
arguments = sys.argv[sys.argv.index("zaya_jax.main") + 1 :]
sys.argv = ["zaya_jax.main", *arguments]
runpy.run_module("zaya_jax.main", run_name="__main__", alter_sys=True)
"""


@pytest.mark.soak
def test_a_run_is_rolled_back_past_bad_rows(tmp_path):
    """The loss is bad from step 12 on, until the rows of those steps are skipped."""
    (tmp_path / "trainer.py").write_text(BAD_LOSS)
    arguments = ["--config", str(write_run(tmp_path)), *TRAINER, "checkpoint.keep=9", f"phases.0.tokens={400 * 128}"]
    command = [sys.executable, str(tmp_path / "trainer.py"), "-m", "zaya_jax.main", *arguments]
    policy = {"training": {"spike_steps": 3}, "log_only": [], "timeouts": {}}
    supervised = Supervised(tmp_path, command, policy=policy)
    assert supervised.wait(200) == 0
    ends = supervised.kinds("end")
    assert [end["code"] for end in ends] == ["loss-not-finite", "finished"]
    (decided,) = supervised.kinds("decide")
    assert decided["action"] == "roll_back"
    text = supervised.kinds("start")[1]["text"]
    skip = text[text.index("data.skip_rows=") :]
    ((first, end),) = json.loads(skip.partition("=")[2])
    assert first <= 11 * 4 < end  # step 12 is the first bad one; a step has four rows
    assert first % 4 == end % 4 == 0
    alone = [sys.executable, "-m", "zaya_jax.main", *arguments, skip, f"run_dir={tmp_path / 'alone'}"]
    subprocess.run(alone, cwd=ROOT, check=True, timeout=200, capture_output=True)
    leaves = [read_manifest(folder / CHECKPOINTS / "400").leaves for folder in (supervised.run_dir, tmp_path / "alone")]
    assert leaves[0] == leaves[1]


def test_a_hang_is_timed_from_when_the_timeout_in_force_expires():
    """The fault happens at 10 s; another process compiles until 14 s, and the timeout is 3 s."""
    start = {"kind": "start", "code": "attempt", "id": 1, "attempt": 1, "monotonic": 0.0, "unix": 0.0}
    detect = {"kind": "detect", "code": "hang", "severity": "error", "id": 2, "attempt": 1, "monotonic": 17.05,
              "unix": 17.05, "seconds": {"detect": 3.05, "quiet": 3.05, "timeout": 3.0}}  # fmt: skip
    end = {"kind": "end", "code": "hang-data", "cause": 2, "attempt": 1, "monotonic": 18.0, "unix": 18.0, "id": 3,
           "rank": 1, "fault": "hang"}  # fmt: skip
    inject = {"kind": "inject", "code": "wait@1:5:data", "attempt": 1, "made_at": 10.0, "monotonic": 18.0, "id": 4}
    events = [start, detect, end, inject]
    card = score([parse_fault("wait@1:5:data")], [start, end], events, 3.0, 1)
    assert card["classes"]["hang"]["detect"]["p50"] == pytest.approx(0.05)
    assert card["classes"]["hang"]["since_fault"]["p50"] == pytest.approx(7.05)
    assert card["attributed"] == 1


@given(st.integers(1, 60), st.integers(1, 8), st.integers(0, 2**31))
def test_faults_can_happen_in_the_order_in_which_they_are_drawn(count, processes, seed):
    faults = draw_faults(count, processes, 100, 4, random.Random(seed))
    assert len(faults) == count
    steps = [fault.step for fault in faults if fault.step]
    assert steps == sorted(steps)
    assert max(steps, default=0) <= 96
    assert all(fault.process < processes and parse_fault(str(fault)) == fault for fault in faults)


@pytest.mark.parametrize("text", ["sigkill", "sigkill@0:1", "flood@0:1:data", "wait@0:1:nowhere", "wait@x:1:data"])
def test_a_fault_that_is_none_is_refused(text):
    with pytest.raises(InputError, match="must have the form FAULT@PROCESS:STEP:PHASE"):
        parse_fault(text)
