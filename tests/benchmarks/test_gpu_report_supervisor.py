"""The part of the GPU report that makes faults under the supervisor: the faults, and what it makes of the outcome."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks.gpu_report import supervisor as part
from benchmarks.gpu_report.runs import temporary_folder
from benchmarks.gpu_report.supervisor import describe, measure_supervisor, read_gpus
from tests.aegis.test_gpu_probe import NVIDIA
from tests.report_helpers import check_form
from tests.train_helpers import ROOT
from zaya_jax.aegis import __main__ as command
from zaya_jax.aegis.drill import score
from zaya_jax.config import to_yaml
from zaya_jax.errors import ExitCode

CARD = {"faults": 1, "made": 1, "missed": [], "false_alarms": 0, "identical": True,
        "times": [{"fault": "sigkill@0:5:dispatch", "since_fault": 0.03, "recover": 5.5}]}  # fmt: skip
STOPPED = {"status": 93, "class": "device_memory", "seconds": 0.2}
EVENTS = [{"kind": "start"}, {"kind": "detect", "fault": "gpu", "code": "gpu-pcie-replay", "text": "Repeated: 2."}]
GPUS = [{"memory_used": 10**8, "processes": 0, "temperature": 50}, {"memory_used": 2 * 10**8, "processes": 1}]
UNREAD = "GPUs are not read: no library."


def test_faults_and_readings_become_figures():
    result = describe(CARD, STOPPED, EVENTS, GPUS, GPUS)
    assert "failed" not in result
    assert result["notes"] == []
    assert result["figures"] == {
        "sigkill: detected": [0.03, "s"], "sigkill: next step": [5.5, "s"], "false alarms": [0, ""],
        "bitwise identical": [1, ""], "device-memory: detected": [0.2, "s"],
        "memory used left on the GPU": [0, "bytes"], "processes left on the GPU": [0, ""],
    }  # fmt: skip
    assert result["gpu_events"] == ["gpu-pcie-replay: Repeated: 2."]
    assert result["counters"] == GPUS


@pytest.mark.parametrize(("card", "problem"), [
    ({"made": 0}, "Only 0 of 1 faults"),
    ({"missed": [{"fault": "sigkill@0:5:dispatch", "said": {"fault": "hang"}}]}, "was taken for {'fault': 'hang'}"),
    ({"false_alarms": 2}, "2 false alarms"),
    ({"identical": False}, "not bitwise the undisturbed one"),
])  # fmt: skip
def test_what_is_wrong_with_a_drill_is_said(card, problem):
    assert problem in describe({**CARD, **card}, "No time.", EVENTS, UNREAD, UNREAD)["failed"]


@pytest.mark.parametrize("end", [{"status": 0}, {"class": "crash"}])
def test_a_device_without_memory_must_stop_the_run(end):
    assert "should end with 93 and device_memory" in describe(CARD, STOPPED | end, EVENTS, UNREAD, UNREAD)["failed"]


@pytest.mark.parametrize(("changed", "problem"), [
    ({"memory_used": 3 * 10**9}, "memory used left on the GPU: 2,900,000,000"),
    ({"processes": 1}, "processes left on the GPU: 1"),
])  # fmt: skip
def test_memory_and_processes_that_stay_on_the_gpu_are_said(changed, problem):
    assert problem in describe(CARD, STOPPED, EVENTS, GPUS, [GPUS[0] | changed, GPUS[1]])["failed"]


def test_what_could_not_be_measured_is_said():
    for before, after in ((UNREAD, UNREAD), (GPUS, UNREAD), (UNREAD, GPUS)):
        unread = describe(CARD, "No time.", EVENTS, before, after)
        check_form("supervisor", unread)
        assert unread["notes"] == [UNREAD, "No time."]
        assert "failed" not in unread
        assert "memory used left on the GPU" not in unread["figures"]
    silent = [{"memory_used": None}, {"memory_used": 5, "processes": None}]
    notes = describe(CARD, STOPPED, EVENTS, silent, silent)["notes"]
    assert notes == ["The GPU does not report memory_used.", "The GPU does not report processes."]


def test_gpus_are_read_through_the_probe_of_the_supervisor(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text(NVIDIA)
    (tmp_path / "amdsmi.py").write_text("raise ModuleNotFoundError")
    (tmp_path / "gpus.json").write_text(json.dumps({"gpus": [{"name": "GPU-1"}, {"name": "GPU-2"}]}))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    monkeypatch.setenv("FAKE_GPUS", str(tmp_path / "gpus.json"))
    gpus = read_gpus()
    assert not isinstance(gpus, str)
    totals = [sum(gpu[field] for gpu in gpus) for field in ("memory_used", "processes")]
    assert totals == [4 * 10**9, 4]
    assert {gpu["pcie_replays"] for gpu in gpus} == {None}
    (tmp_path / "gpus.json").write_text(json.dumps({"gpus": [], "fault": "raise"}))
    assert "driver not loaded" in read_gpus()


def test_a_drill_makes_the_faults_that_it_is_given(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(command.Drill, "run", lambda drill, say: made.extend(drill.faults) or {})
    monkeypatch.setattr(command, "format_card", str)
    (tmp_path / "run.yaml").write_text(to_yaml(part._make_config(tmp_path, small=True)))
    arguments = ["drill", "--folder", str(tmp_path / "drill"), "--fault", "device-hang@0:4:device_wait", "--fault"]
    trainer = ["--", "--config", str(tmp_path / "run.yaml")]
    with pytest.raises(KeyError):  # the card is empty
        command.main([*arguments, "host-memory@0:9:data", *trainer])
    assert list(map(str, made)) == ["device-hang@0:4:device_wait", "host-memory@0:9:data"]
    assert command.main([*arguments, "flood@0:9:data", *trainer]) == ExitCode.BAD_INPUT


@pytest.mark.parametrize(("name", "kind"), [("device-hang", "hang"), ("host-memory", "host_memory")])
def test_each_fault_has_its_class(name, kind):
    events = [
        {"kind": "start", "code": "attempt", "id": 1, "attempt": 1, "monotonic": 0.0, "unix": 0.0},
        {"kind": "detect", "code": kind, "severity": "error", "id": 2, "attempt": 1, "monotonic": 17.0, "unix": 17.0},
        {"kind": "end", "code": kind, "cause": 2, "attempt": 1, "monotonic": 18.0, "unix": 18.0, "id": 3, "rank": 0,
         "fault": kind},
        {"kind": "inject", "code": f"{name}@0:5:data", "attempt": 1, "made_at": 10.0, "monotonic": 18.0, "id": 4},
    ]  # fmt: skip
    card = score([], [events[0], events[2]], events, 3.0, 1)
    assert card["attributed"] == 1
    assert card["classes"][kind]["since_fault"]["p50"] == pytest.approx(7.0)


def test_host_memory_runs_out_as_it_does_in_python():
    fault = "from zaya_jax.aegis.faults import FAULTS\ntry: FAULTS['host-memory']()\nexcept MemoryError: print('out')"
    done = subprocess.run([sys.executable, "-c", fault], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "out\n", done.stderr


@pytest.mark.parametrize(("seconds", "note"), [(1.0, ["There was no time to let device memory run out."]), (99.0, [])])
def test_device_memory_runs_out_if_there_is_time(monkeypatch, seconds, note):
    monkeypatch.setattr(part, "read_gpus", lambda: GPUS)
    monkeypatch.setattr(part, "_drill", lambda *_: CARD)
    monkeypatch.setattr(part, "_run_out_of_device_memory", lambda *_: STOPPED)
    result = measure_supervisor(False, seconds)
    assert "failed" not in result
    assert result["notes"] == note
    assert ("device-memory: detected" in result["figures"]) == (not note)


@pytest.mark.soak
def test_faults_are_made_on_a_cpu():
    result = measure_supervisor(small=True)
    assert "failed" not in result
    assert result["drill"]["made"] == 3
    figures = result["figures"]
    assert 5 <= figures["device-hang: detected"][0] < figures["device-hang: next step"][0]
    assert figures["host-memory: detected"][0] < 5
    assert len(result["notes"]) == 2


@pytest.mark.soak
def test_a_run_whose_device_has_too_little_memory_is_stopped(monkeypatch):
    """A CPU refuses to allocate more than any machine has, with the same error of XLA."""
    monkeypatch.setitem(os.environ, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    with temporary_folder("test") as folder:
        (folder / "run.yaml").write_text(to_yaml(part._make_config(folder, small=True)))
        end = part._run_out_of_device_memory(folder, folder / "run.yaml")
    assert (end["status"], end["class"]) == (93, "device_memory")
    assert end["verdict"]["exit_code"] == 93
    assert 0 < end["seconds"] < 10
