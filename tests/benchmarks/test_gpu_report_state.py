"""The part of the GPU report that saves and resumes: what it notes, and what it makes of that."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from benchmarks.gpu_report import state as part
from benchmarks.gpu_report.state import Room, describe_training, fit, measure_state
from benchmarks.train_step import Fitting
from tests.train_helpers import ROOT, STEP
from zaya_jax.errors import InputError

GB = 10**9
FITTED = {"state_bytes": 46 * GB, "layers": 24, "reduced": None}
FIRST = {"started": 0.0, "restore_started": 5.0, "restored": 9.0, "restored_device_peak": 50 * GB, "step_1": 20.0,
         "training_continued": 20.5, "committed": 50.0, "step_2": 22.0, "loss": 5.25, "grad_norm": 1.5,
         "device_peak": 80 * GB, "host_peak": 60 * GB}  # fmt: skip
SECOND = {"started": 100.0, "restore_started": 105.0, "restored": 125.0, "restored_device_peak": 46 * GB,
          "step_2": 130.0, "loss": 5.25, "grad_norm": 1.5, "device_peak": 80 * GB, "host_peak": 55 * GB}  # fmt: skip

OBSERVED = """
import sys, time
from pathlib import Path
from benchmarks.gpu_report import observed_training
from zaya_jax.run.progress_record import Phase, ProgressRecord
observed_training.device_peak = lambda: 7
output, checkpoint, saves = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "saves"
observed_training.observe(output, checkpoint)
record = ProgressRecord()
record.enter(Phase.RESTORE)
record.enter(Phase.COMPILE)
if saves:
    record.enter(Phase.SAVE)
    record.complete_step(1, 6.0, 2.0)
    time.sleep(0.2)
    record.enter(Phase.DATA)
    checkpoint.mkdir()
else:
    record.start_training(1, output)
record.complete_step(2, 5.0, 1.0)
print("still here")
"""


@pytest.mark.parametrize("saves", [True, False])
def test_a_process_notes_what_it_does_and_dies_after_the_second_step(tmp_path, saves):
    notes = tmp_path / "notes.json"
    command = [sys.executable, "-c", OBSERVED, str(notes), str(tmp_path / "1"), "saves" if saves else "resumes"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (-9, ""), done.stderr
    seen = json.loads(notes.read_text())
    assert (seen["loss"], seen["grad_norm"], seen["device_peak"], seen["restored_device_peak"]) == (5.0, 1.0, 7, 7)
    assert seen["restore_started"] <= seen["restored"] <= seen["step_2"]
    assert seen["host_peak"] > 2**23
    assert ("step_1" in seen) == ("committed" in seen) == saves
    if saves:
        assert 0.2 <= seen["training_continued"] - seen["step_1"] < 5
        assert seen["committed"] > seen["training_continued"]


def test_times_and_peaks_of_both_processes_become_figures():
    described = describe_training(FIRST, SECOND, FITTED)
    assert described["problems"] == described["notes"] == []
    assert described["figures"] == {
        "training waits for the save": [0.5, "s"], "until durable": [30.0, "s"], "step beside the save": [1.5, "s"],
        "restore": [20.0, "s"], "start to first resumed step": [30.0, "s"], "device peak, training": [80.0, "GB"],
        "device peak, resuming": [80.0, "GB"], "device peak after restoring": [46.0, "GB"],
        "host peak, training": [60.0, "GB"], "host peak, resuming": [55.0, "GB"], "state": [46.0, "GB"],
        "resumed step bitwise the same": [1, ""],
    }  # fmt: skip


@pytest.mark.parametrize(("first", "second", "problem"), [
    ({}, {"device_peak": 92 * GB}, "Resuming takes 92 GB of device memory, more than the 80 GB"),
    ({"committed": None}, {}, "was not saved"),
    ({}, {"step_1": 120.0}, "started over"),
])  # fmt: skip
def test_what_is_wrong_is_said(first, second, problem):
    notes = {key: value for key, value in {**FIRST, **first}.items() if value is not None}
    described = describe_training(notes, {**SECOND, **second}, FITTED)
    assert problem in " ".join(described["problems"])
    assert len(described["problems"]) == 1


def test_another_resumed_step_and_a_device_that_counts_nothing_are_said():
    described = describe_training({**FIRST, "device_peak": None}, {**SECOND, "loss": 5.26}, FITTED)
    assert described["figures"]["resumed step bitwise the same"] == [0, ""]
    assert "device peak, training" not in described["figures"]
    assert "does not count its peak memory" in described["notes"][0]
    assert described["problems"] == []


def test_the_depth_is_reduced_to_what_can_be_stored(monkeypatch):
    monkeypatch.setattr(part, "compile_fitting", lambda config, *_: Fitting(config, None, None, None, 1.0))
    unlimited = fit(STEP, Room(1e12, 1e12, 1e12))
    assert (unlimited["layers"], unlimited["reduced"]) == (2, None)
    reduced = fit(STEP, Room(1e12, unlimited["state_bytes"] - 1, 1e12))
    assert reduced["layers"] == 1
    assert reduced["state_bytes"] < unlimited["state_bytes"]
    assert "1 of 2 layers: free host memory does not suffice" in reduced["reduced"]
    with pytest.raises(InputError, match="free disk space allows"):
        fit(STEP, Room(1000, 1e12, 1e12))


def test_a_run_that_fails_is_said(monkeypatch):
    def fail(*_):
        raise RuntimeError("The device is on fire.")

    monkeypatch.setattr(part, "describe_disk", lambda _: {"mb_per_second": 1000})
    monkeypatch.setattr(part, "_measure_training", fail)
    assert measure_state(small=True)["failed"] == "The device is on fire."


KILLED = """
import sys, time
from benchmarks.gpu_report.runs import temporary_folder
with temporary_folder("test") as folder:
    (folder / "large").write_bytes(b"x" * 1000)
    print(folder, flush=True)
    time.sleep(600 if sys.argv[1] == "killed" else 0)
"""


@pytest.mark.parametrize("end", ["killed", "finished"])
def test_nothing_is_left_on_the_disk(end):
    with subprocess.Popen([sys.executable, "-c", KILLED, end], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        if end == "killed":
            assert (folder / "large").exists()
            process.kill()
    deadline = time.monotonic() + 30
    while folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.soak
def test_a_small_state_is_measured_on_a_cpu():
    result = measure_state(small=True)
    assert "failed" not in result
    assert result["training"]["layers"] == 2
    figures = result["figures"]
    assert figures["resumed step bitwise the same"] == [1, ""]
    assert 0 < figures["training waits for the save"][0] < figures["until durable"][0]
    assert 0 < figures["restore"][0] < figures["start to first resumed step"][0]
