"""What is read of the machine: links from files like sysfs's, counters of cgroups, and GPUs through false libraries."""

import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis.gpu_probe import GpuProbe
from zaya_jax.aegis.host import HostWatch
from zaya_jax.aegis.network import NetworkWatch


@pytest.fixture
def sysfs(tmp_path):
    for name in ("mlx5_0", "ionic_1"):
        port = tmp_path / "class" / "infiniband" / name / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text("4: ACTIVE\n")
    for name in ("ens1", "veth0"):
        (tmp_path / "class" / "net" / name).mkdir(parents=True)
        (tmp_path / "class" / "net" / name / "operstate").write_text("up\n")
    (tmp_path / "class" / "net" / "ens1" / "device").mkdir()
    return tmp_path


def set_link(sysfs, state):
    (sysfs / "class" / "infiniband" / "ionic_1" / "ports" / "1" / "state").write_text(state)


def codes(observations):
    return [(each.code, str(each.severity)) for each in observations]


def test_a_short_flap_is_a_warning_and_a_long_one_an_error(sysfs):
    watch = NetworkWatch(10.0, sysfs)
    assert watch.poll(0.0) == []
    set_link(sysfs, "1: DOWN\n")
    assert codes(watch.poll(1.0)) == [("link-down", "warning")]
    assert watch.poll(5.0) == []
    set_link(sysfs, "4: ACTIVE\n")
    assert codes(watch.poll(6.0)) == [("link-flap", "warning")]
    set_link(sysfs, "1: DOWN\n")
    assert codes(watch.poll(7.0)) == [("link-down", "warning")]
    assert codes(watch.poll(17.0)) == [("link-lost", "error")]
    assert watch.poll(99.0) == []


def test_an_adapter_that_disappears_is_down_and_a_virtual_one_is_left_out(sysfs):
    watch = NetworkWatch(10.0, sysfs)
    (sysfs / "class" / "net" / "veth0" / "operstate").unlink()
    assert watch.poll(0.0) == []
    (sysfs / "class" / "net" / "ens1" / "operstate").unlink()
    assert codes(watch.poll(1.0)) == [("link-down", "warning")]


def test_a_link_that_is_down_from_the_start_is_not_the_run_s(sysfs):
    set_link(sysfs, "1: DOWN\n")
    assert NetworkWatch(1.0, sysfs).poll(100.0) == []


@given(st.binary(max_size=200))
def test_any_content_of_sysfs_is_read_without_harm(tmp_path_factory, content):
    port = tmp_path_factory.mktemp("sys") / "class" / "infiniband" / "x" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_bytes(content)
    NetworkWatch(1.0, port.parents[4]).poll(0.0)


@pytest.mark.parametrize(
    ("group", "counter", "text"),
    [
        ("0::/job/step", "sys/fs/cgroup/job/step/memory.events", "low 0\noom 1\noom_kill {}\n"),
        ("4:memory:/job", "sys/fs/cgroup/memory/job/memory.oom_control", "under_oom 0\noom_kill {}\n"),
    ],
)
def test_a_kill_in_the_cgroup_is_seen_once(tmp_path, group, counter, text):
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(f"1:cpu:/\n{group}\n")
    path = tmp_path / counter
    path.parent.mkdir(parents=True)
    path.write_text(text.format(2))
    watch = HostWatch(tmp_path, tmp_path)
    assert watch.poll() == []
    path.write_text(text.format(3))
    assert codes(watch.poll()) == [("out-of-memory", "error")]
    assert watch.poll() == []


AMD = """
import os, time
READS = os.environ["READS"]
count = len(open(READS).read()) if os.path.exists(READS) else 0
open(READS, "a").write("x")
def amdsmi_init(): {init}
def amdsmi_get_processor_handles(): return [0, 1][: {gpus}]
def amdsmi_get_gpu_total_ecc_count(handle):
    bad = handle == 1
    return {{"uncorrectable_count": {uncorrectable} * bad, "correctable_count": {correctable} * bad}}
def amdsmi_get_pcie_info(handle): return {{"pcie_metric": {{"pcie_replay_count": 0}}}}
"""
NVIDIA = """
import os
READS = os.environ["READS"]
count = len(open(READS).read()) if os.path.exists(READS) else 0
open(READS, "a").write("x")
class NVMLError(Exception): pass
NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_VOLATILE_ECC = 1, 0, 0
def nvmlInit(): pass
def nvmlDeviceGetCount(): return 1
def nvmlDeviceGetHandleByIndex(index): return index
def nvmlDeviceGetTotalEccErrors(handle, kind, counter): return count * kind
def nvmlDeviceGetPcieReplayCounter(handle): raise NVMLError
"""


def probe(folder: Path, monkeypatch, name: str, text: str, rounds: int = 2, timeout: float = 10.0) -> list:
    """What `rounds` probes tell, with a false library in the path of their processes."""
    (folder / f"{name}.py").write_text(textwrap.dedent(text))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{Path(__file__).parents[2]}")
    monkeypatch.setenv("READS", str(folder / "reads"))
    seen, watch = [], GpuProbe(0.0, timeout)
    for _ in range(rounds):
        watch.poll(time.monotonic())
        while watch.pids:
            time.sleep(0.01)
            seen += watch.poll(time.monotonic())
    watch.close()
    return [(each.code, str(each.severity), each.rank) for each in seen]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, []),
        ({"uncorrectable": "count"}, [("gpu-uncorrectable-ecc", "error", 1)]),
        ({"correctable": "7 * count"}, [("gpu-correctable-ecc", "warning", 1)]),
        ({"gpus": "2 - count"}, [("gpu-lost", "fatal", 1)]),
        ({"init": "raise RuntimeError"}, [("gpu-probe-failed", "info", None)]),
    ],
)
def test_what_amd_s_library_counts(tmp_path, monkeypatch, changes, expected):
    healthy = {"init": "pass", "gpus": "2", "uncorrectable": "0", "correctable": "0"}
    assert probe(tmp_path, monkeypatch, "amdsmi", AMD.format(**(healthy | changes))) == expected


def test_what_nvidia_s_library_counts(tmp_path, monkeypatch):
    (tmp_path / "amdsmi.py").write_text("raise ImportError")
    assert probe(tmp_path, monkeypatch, "pynvml", NVIDIA) == [("gpu-uncorrectable-ecc", "error", 0)]


def test_a_library_that_hangs_is_killed_and_told_once(tmp_path, monkeypatch):
    text = AMD.format(init="time.sleep(60)", gpus="2", uncorrectable="0", correctable="0")
    began = time.monotonic()
    assert probe(tmp_path, monkeypatch, "amdsmi", text, timeout=1.0) == [("gpu-probe-timeout", "info", None)]
    assert time.monotonic() - began < 5


def test_without_a_library_one_probe_says_so(tmp_path, monkeypatch):
    (tmp_path / "pynvml.py").write_text("raise ImportError")
    seen = probe(tmp_path, monkeypatch, "amdsmi", "raise ImportError", rounds=3)
    assert seen == [("gpu-probe-missing", "info", None)]


def test_the_probe_imports_no_library_of_the_trainer():
    import subprocess

    code = "import sys, zaya_jax.aegis.gpu_probe; print({'jax', 'numpy'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"
