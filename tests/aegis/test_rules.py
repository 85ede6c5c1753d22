"""What the policy says is done about faults of the machine: false libraries and files, real processes and signals."""

import json
import os
import time
from pathlib import Path

import pytest

from tests.aegis.aegis_helpers import left_running, supervise_light
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.run.goodput import measure_goodput

ROOT = Path(__file__).parents[2]
BROKEN = """
import os
path = os.environ["READS"]
with open(path, "a") as file: file.write("x")
count = os.path.getsize(path)
class AmdSmiException(Exception): pass
class AmdSmiTemperatureType: HOTSPOT = 1
class AmdSmiTemperatureMetric: CURRENT = 0
class AmdSmiMemoryType: VRAM = 0
def amdsmi_init(): pass
def amdsmi_shut_down(): pass
def amdsmi_get_processor_handles(): return [0, 1]
def amdsmi_get_gpu_device_bdf(gpu): return f"0000:0{gpu}:00.0"
def amdsmi_get_gpu_total_ecc_count(gpu):
    return {"correctable_count": 0, "uncorrectable_count": count * gpu, "deferred_count": 0}
def amdsmi_get_pcie_info(gpu): return {"pcie_metric": {"pcie_replay_count": 0}}
def amdsmi_get_temp_metric(gpu, sensor, metric): return 55
def amdsmi_get_gpu_memory_usage(gpu, kind): return 10 ** 9
"""


@pytest.fixture
def sysfs(tmp_path):
    """A port of a network card, as sysfs shows it."""
    port = tmp_path / "sys" / "class" / "infiniband" / "ionic_1" / "ports" / "1"
    (port / "counters").mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "phys_state").write_text("5: LinkUp\n")
    return tmp_path / "sys"


def set_link(sysfs, is_up):
    port = sysfs / "class" / "infiniband" / "ionic_1" / "ports" / "1"
    (port / "state").write_text("4: ACTIVE\n" if is_up else "1: DOWN\n")
    (port / "phys_state").write_text("5: LinkUp\n" if is_up else "3: Disabled\n")


def with_amd(folder, **policy):
    """The environment and policy of a machine whose second AMD GPU has an uncorrectable error after the first probe."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "amdsmi.py").write_text(BROKEN)
    environment = {"PYTHONPATH": f"{folder}:{ROOT}", "READS": str(folder / "reads")}
    return {"environment": environment, "policy": {"watch": {"gpu_seconds": 0.5}, "grace_seconds": 20.0, **policy}}


def test_by_default_an_error_of_a_gpu_is_reported_and_training_continues(tmp_path):
    supervised = supervise_light(tmp_path, 300, **with_amd(tmp_path))
    assert supervised.wait() == SupervisorExit.DONE
    (detected, *_) = supervised.faults
    assert (detected["code"], detected["device"]) == ("gpu-uncorrectable-ecc", 1)
    decided = supervised.kinds("decide")
    assert {(event["cause"], event["log_only"]) for event in decided} >= {(detected["id"], "replace_node")}
    assert len(supervised.kinds("start")) == 1


def test_if_the_policy_lets_it_the_run_is_saved_and_asks_for_another_node(tmp_path):
    supervised = supervise_light(tmp_path, 5000, **with_amd(tmp_path, log_only=[]))
    assert supervised.wait() == SupervisorExit.RETRY_ELSEWHERE
    (end,) = supervised.kinds("end")
    assert (end["code"], end["fault"], end["exit_statuses"]) == ("gpu-uncorrectable-ecc", "gpu", [143])
    assert int((tmp_path / "checkpoint-0").read_text()) == end["last_step"] > 0


@pytest.mark.parametrize(("seconds", "attempts"), [(1.2, 1), (60.0, 2)])
def test_a_short_flap_of_a_link_restarts_nothing_and_a_long_one_does(tmp_path, sysfs, seconds, attempts):
    policy = {"watch": {"sysfs": str(sysfs), "link_down_seconds": 2.5}, "log_only": []}
    folder = tmp_path / "run"
    supervised = supervise_light(folder, 450, policy=policy)
    supervised.wait_for(folder / "checkpoint-0")
    set_link(sysfs, is_up=False)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and len(supervised.kinds("start")) < 2:
        time.sleep(0.05)
    set_link(sysfs, is_up=True)
    assert supervised.wait() == SupervisorExit.DONE
    assert len(supervised.kinds("start")) == attempts
    assert supervised.faults[0]["code"] == "link-down"


def test_a_line_of_the_trainer_puts_its_end_in_the_right_class(tmp_path):
    line = "Stopped: Every checkpoint in run/checkpoints is damaged. They are kept there."
    supervised = supervise_light(tmp_path, 20, "say@3", "exit@4", environment={"SAY": line})
    assert supervised.wait() == SupervisorExit.NO_CHECKPOINT
    (end,) = supervised.kinds("end")
    assert (end["code"], end["fault"]) == ("no-checkpoint", "checkpoint")


def test_a_line_of_the_kernel_s_log_is_seen(tmp_path):
    log = tmp_path / "dmesg"
    log.write_text("")
    supervised = supervise_light(tmp_path, 250, policy={"watch": {"kernel_log": str(log)}})
    supervised.wait_for(tmp_path / "checkpoint-0")
    log.write_text("amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!\n")
    assert supervised.wait() == SupervisorExit.DONE
    assert "gpu-reset" in [event["code"] for event in supervised.faults]


def test_the_supervisor_is_small_and_imports_nothing_of_the_trainer(tmp_path):
    supervised = supervise_light(tmp_path, 300)
    supervised.wait_for(tmp_path / "checkpoint-0")
    pid = supervised.process.pid
    maps = Path(f"/proc/{pid}/maps").read_text()
    resident = int(next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                        if line.startswith("VmRSS")).split()[1])  # fmt: skip
    assert supervised.wait() == SupervisorExit.DONE
    assert not [name for name in ("jaxlib", "numpy") if name in maps]
    assert resident < 60_000, f"{resident} kB"


def test_no_descriptor_is_left_of_an_attempt(tmp_path):
    """The supervisor has as many open files in each attempt as in the first."""
    faults = ["SIGKILL@40", "wait@80", "raise@120", "child@160", "SIGKILL@161"]
    supervised = supervise_light(tmp_path, 200, *faults, processes=2, policy={"restart": {"delays": [0.0]}})
    counts, attempts = [], 0
    while supervised.process.poll() is None:
        state = supervised.folder / "state.json"
        if state.exists() and (now := json.loads(state.read_text())["attempt"]) > attempts:
            attempts = now
            counts.append(len(os.listdir(f"/proc/{supervised.process.pid}/fd")))
        time.sleep(0.01)
    assert supervised.wait() == SupervisorExit.DONE
    assert max(counts[1:]) <= counts[0], counts
    assert not left_running(tmp_path)


def test_people_are_told_of_severe_events_and_of_the_end(tmp_path):
    news = tmp_path / "news"
    command = tmp_path / "tell"
    command.write_text(f"#!/bin/sh\ncat >> {news}\n")
    command.chmod(0o755)
    supervised = supervise_light(tmp_path, 12, "raise@7!", policy={"notify": {"command": [str(command)]}})
    assert supervised.wait() == SupervisorExit.DO_NOT_REQUEUE
    told = [json.loads(line) for line in news.read_text().splitlines()]
    assert {event["kind"] for event in told} >= {"detect", "end", "act"}
    assert "exit-do_not_requeue" in {event["code"] for event in told}
    assert {event["severity"] for event in told} <= {"error", "fatal"}


@pytest.mark.parametrize("acts", [False, True])
def test_a_loss_that_is_not_finite_is_reported_and_ends_the_run_only_if_the_policy_says_so(tmp_path, acts):
    policy = {"training": {"spike_steps": 5}} | ({"log_only": []} if acts else {})
    steps = 400 if acts else 60  # enough that training has not ended before the supervisor reads the losses
    supervised = supervise_light(tmp_path, steps, "diverge@12", policy=policy)
    assert supervised.wait() == (SupervisorExit.DO_NOT_REQUEUE if acts else SupervisorExit.DONE)
    (detected,) = [event for event in supervised.faults if event["code"] == "loss-not-finite"]
    assert "5 steps, until step" in detected["text"]
    decided = supervised.kinds("decide")
    if acts:  # another command than the trainer cannot be rolled back
        assert "No checkpoint is older" in supervised.verdict["why"]
    else:
        assert [event["log_only"] for event in decided] == ["roll_back"]


def test_a_process_that_is_slower_than_the_others_is_reported(tmp_path):
    policy = {"training": {"straggler_steps": 20, "straggler_windows": 2}}
    supervised = supervise_light(tmp_path, 120, "idle@20:0", "slow@20:1", "idle@20:2", processes=3, policy=policy)
    assert supervised.wait() == SupervisorExit.DONE
    stragglers = [event for event in supervised.faults if event["code"] == "straggler"]
    assert [event["rank"] for event in stragglers] == [1]
    assert len(supervised.kinds("start")) == 1


CLOCK = """
import os, time
real = time.time
def shifted(): return real() + (float(open(os.environ["SHIFT"]).read()) if os.path.exists(os.environ["SHIFT"]) else 0)
time.time = shifted
"""


@pytest.mark.parametrize("shift", [3600.0, -3600.0])
def test_a_clock_that_is_set_kills_nothing(tmp_path, shift):
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "SHIFT": str(tmp_path / "shift")}
    supervised = supervise_light(tmp_path, 200, "SIGKILL@100", environment=environment)
    supervised.wait_for(tmp_path / "checkpoint-0")
    (tmp_path / "shift").write_text(str(shift))
    assert supervised.wait() == SupervisorExit.DONE
    assert [event["code"] for event in supervised.kinds("end")] == ["signal-SIGKILL", "finished"]
    start, *_, end = supervised.events
    assert abs(end["unix"] - start["unix"] - shift) < 60
    assert measure_goodput(supervised.events).seconds < 60
