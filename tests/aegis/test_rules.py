"""What the policy says is done about faults of the machine: false libraries and files, real processes and signals."""

import json
import time
from pathlib import Path

import jsonschema
import pytest

from tests.aegis.aegis_helpers import SCHEMA, check_events, left_running, supervise_light
from tests.aegis.signature_samples import SAMPLES
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.exporter import RunReader
from zaya_jax.aegis.goodput import measure_goodput
from zaya_jax.aegis.supervision_report import format_report, list_faults

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


def test_by_default_what_is_seen_is_reported_and_training_continues(tmp_path):
    """An error of a GPU, a line of the kernel's log, and a loss that is not finite."""
    log = tmp_path / "dmesg"
    log.write_text("")
    options = with_amd(tmp_path, training={"spike_steps": 5})
    options["policy"]["watch"]["kernel_log"] = str(log)
    supervised = supervise_light(tmp_path, 300, "diverge@200", **options)
    supervised.wait_for(tmp_path / "checkpoint-0")
    log.write_text("amdgpu 0000:c1:00.0: amdgpu: GPU reset begin!\n")
    assert supervised.wait() == SupervisorExit.DONE
    faults, decided = {event["code"]: event for event in supervised.faults}, supervised.kinds("decide")
    assert faults["gpu-uncorrectable-ecc"]["device"] == 1
    assert "The loss was not finite in 5 of" in faults["loss-not-finite"]["text"]
    assert {(event["cause"], event["log_only"]) for event in decided} >= {
        (faults["gpu-uncorrectable-ecc"]["id"], "replace_node"), (faults["loss-not-finite"]["id"], "roll_back")
    }  # fmt: skip
    assert "gpu-reset" in faults
    assert len(supervised.kinds("start")) == 1


def test_if_the_policy_lets_it_the_run_is_saved_and_asks_for_another_node(tmp_path):
    supervised = supervise_light(tmp_path, 5000, **with_amd(tmp_path, log_only=[]))
    assert supervised.wait() == SupervisorExit.RETRY_ELSEWHERE
    check_events(supervised.events)
    (end,) = supervised.kinds("end")
    assert (end["code"], end["fault"], end["exit_statuses"]) == ("gpu-uncorrectable-ecc", "gpu", [143])
    assert int((tmp_path / "checkpoint-0").read_text()) == end["last_step"] > 0


def test_a_short_flap_of_a_link_restarts_nothing_and_a_long_one_does(tmp_path, sysfs):
    policy = {"watch": {"sysfs": str(sysfs), "link_down_seconds": 2.5}, "log_only": []}
    folder = tmp_path / "run"
    supervised = supervise_light(folder, 5000, policy=policy)

    def wait_for(code, kind="detect", times=1):
        deadline = time.monotonic() + 60
        while [event["code"] for event in supervised.kinds(kind)].count(code) < times:
            assert time.monotonic() < deadline, supervised.said
            time.sleep(0.05)

    supervised.wait_for(folder / "checkpoint-0")
    set_link(sysfs, is_up=False)
    wait_for("link-down")
    set_link(sysfs, is_up=True)
    wait_for("link-flap")
    assert len(supervised.kinds("start")) == 1
    set_link(sysfs, is_up=False)
    wait_for("link-lost")
    set_link(sysfs, is_up=True)
    wait_for("attempt", "start", times=2)
    supervised.process.terminate()
    assert supervised.wait() == SupervisorExit.PREEMPTED
    assert len(supervised.kinds("start")) == 2
    assert supervised.faults[0]["code"] == "link-down"


def test_no_line_of_output_decides_what_is_done_but_one_explains_the_failure(tmp_path):
    """Whatever the processes print, a kill is one fault, and is restarted."""
    lines = "\n".join(text for source, _, text in SAMPLES if source == "trainer")
    supervised = supervise_light(tmp_path, 20, "say@3:0!", "say@3:1!", "SIGKILL@4:1", processes=3,
                                 environment={"SAY": lines})  # fmt: skip
    assert supervised.wait() == SupervisorExit.DONE
    ends = supervised.kinds("end")
    jsonschema.validate(ends[0], SCHEMA)
    assert [(end["code"], end.get("rank")) for end in ends] == [("signal-SIGKILL", 1), ("finished", None)]
    assert ends[0]["explanation"].startswith("rdma-retry-exceeded: node7:4242:4301 [0] net_ib.cc:1985")
    assert [event["code"] for event in supervised.faults] == ["exit--9"]
    assert len(supervised.kinds("detect")) > 20
    assert "2 attempts, 1 fault," in format_report(supervised.run_dir)
    faults = [each for each in RunReader(supervised.run_dir).read() if each.name == "zaya_faults_total"]
    assert {each.labels["fault"]: each.value for each in faults if each.value} == {"crash": 1}


def test_a_kill_for_lack_of_memory_is_one_fault_whatever_the_kernel_writes_of_it(tmp_path):
    (log := tmp_path / "dmesg").write_text("")
    supervised = supervise_light(tmp_path, 20, "oom@4", environment={"KMSG": str(log)},
                                 policy={"watch": {"kernel_log": str(log)}})  # fmt: skip
    assert supervised.wait() == SupervisorExit.DONE
    assert [end["fault"] for end in supervised.kinds("end")[:1]] == ["host_memory"]
    assert [event["code"] for event in supervised.faults].count("host-out-of-memory") == 2
    (fault,) = list_faults(supervised.events)
    assert (fault["fault"], fault["code"], fault["action"]) == ("host_memory", "host-out-of-memory", "restart")


def test_a_trainer_without_an_intact_checkpoint_is_given_up(tmp_path):
    supervised = supervise_light(tmp_path, 20, "damaged@4")
    assert supervised.wait() == SupervisorExit.NO_CHECKPOINT
    (end,) = supervised.kinds("end")
    assert (end["code"], end["fault"]) == ("no-checkpoint", "checkpoint")


def test_a_run_that_others_have_resumed_is_left_to_them(tmp_path):
    """The supervisor ends, and writes nothing more to the run folder."""
    supervised = supervise_light(tmp_path, 5000, "superseded@7:1", processes=2)
    assert supervised.wait() == SupervisorExit.SUPERSEDED
    assert "aegis: Stopped: Other processes have resumed this run. Exit code 96." in supervised.said
    assert {event["kind"] for event in supervised.events} <= {"start"}
    assert {path.name for path in supervised.folder.iterdir()} <= {".lock", "events.jsonl", "state.json"}
    if (state := supervised.folder / "state.json").exists():
        assert json.loads(state.read_text())["state"] == "running"
    assert not left_running(tmp_path)


def test_a_loss_that_is_not_finite_ends_the_run_if_the_policy_says_so(tmp_path):
    policy = {"training": {"spike_steps": 5}, "log_only": []}
    # So many steps that training has not ended before the supervisor reads the losses.
    supervised = supervise_light(tmp_path, 400, "diverge@12", policy=policy)
    assert supervised.wait() == SupervisorExit.DO_NOT_REQUEUE
    (detected,) = [event for event in supervised.faults if event["code"] == "loss-not-finite"]
    assert "The loss was not finite in 5 of" in detected["text"]
    # Another command than the trainer cannot be rolled back.
    assert "No checkpoint is older" in supervised.verdict["why"]


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


def test_a_clock_that_is_set_kills_nothing(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(CLOCK)
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}", "SHIFT": str(tmp_path / "shift")}
    supervised = supervise_light(tmp_path, 200, "SIGKILL@50", environment=environment)
    supervised.wait_for(tmp_path / "checkpoint-0")
    (tmp_path / "next").write_text("3600.0")
    (tmp_path / "next").replace(tmp_path / "shift")
    supervised.wait_for(tmp_path / "done-SIGKILL-50")
    (tmp_path / "next").write_text("-3600.0")
    (tmp_path / "next").replace(tmp_path / "shift")
    assert supervised.wait() == SupervisorExit.DONE
    assert [event["code"] for event in supervised.kinds("end")] == ["signal-SIGKILL", "finished"]
    start, *_, end = supervised.events
    seconds = end["monotonic"] - start["monotonic"]
    assert abs(end["unix"] - start["unix"] - seconds + 3600.0) < 60
    assert measure_goodput(supervised.events).seconds < seconds + 60
