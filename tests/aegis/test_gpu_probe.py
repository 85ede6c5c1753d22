"""Real child processes read fake vendor libraries: errors are compared, and a sick library never takes the job down."""

import json
import os
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zaya_jax.aegis import gpu_probe
from zaya_jax.aegis.failure import FaultClass, Severity
from zaya_jax.aegis.gpu_probe import GpuProbe

ROOT = Path(__file__).parents[2]
SCENARIO = """
import json, os, time
with open(os.environ["FAKE_GPUS"]) as file:
    scenario = json.load(file)
fault, gpus = scenario.get("fault"), scenario.get("gpus", [])
with open(os.environ["FAKE_GPUS"] + ".starts", "a") as file:
    file.write("x")
print("libraries may print", flush=True)
if fault == "hang":
    time.sleep(600)
if fault == "raise":
    raise RuntimeError("driver not loaded")
if fault == "crash":
    os._exit(13)
"""
AMD = (
    SCENARIO
    + """
class AmdSmiException(Exception): pass
class AmdSmiTemperatureType: HOTSPOT = 1
class AmdSmiTemperatureMetric: CURRENT = 0
class AmdSmiMemoryType: VRAM = 0
def amdsmi_init(): pass
def amdsmi_get_processor_handles(): return gpus
def amdsmi_get_gpu_device_bdf(gpu): return gpu["name"]
def amdsmi_get_gpu_total_ecc_count(gpu):
    if "unsupported" in gpu: raise AmdSmiException("AMDSMI_STATUS_NOT_SUPPORTED")
    return {key + "_count": gpu.get(key, 0) for key in ("correctable", "uncorrectable", "deferred")}
def amdsmi_get_pcie_info(gpu): return {"pcie_metric": {"pcie_replay_count": gpu.get("replays", "N/A")}}
def amdsmi_get_temp_metric(gpu, sensor, metric): return 55
def amdsmi_get_gpu_memory_usage(gpu, kind): return 10 ** 9
def amdsmi_get_gpu_process_list(gpu): return [{"pid": 7}]
"""
)
NVIDIA = SCENARIO + '''
from types import SimpleNamespace
NVML_SUCCESS, NVML_ERROR_GPU_IS_LOST, NVML_VOLATILE_ECC, NVML_TEMPERATURE_GPU = 0, 15, 0, 0
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
NVML_FI_DEV_GET_GPU_RECOVERY_ACTION = 230
class NVMLError(Exception):
    def __init__(self, value): self.value = value
def nvmlInit(): pass
def nvmlDeviceGetCount(): return len(gpus)
def nvmlDeviceGetHandleByIndex(index):
    if gpus[index].get("lost"): raise NVMLError(15)
    return gpus[index]
def nvmlDeviceGetUUID(gpu): return gpu["name"]
def nvmlDeviceGetMemoryInfo(gpu): return SimpleNamespace(used=2 * 10 ** 9)
def nvmlDeviceGetComputeRunningProcesses(gpu): return [SimpleNamespace(pid=7), SimpleNamespace(pid=8)]
def nvmlDeviceGetTotalEccErrors(gpu, kind, counter): return gpu.get(("correctable", "uncorrectable")[kind], 0)
def nvmlDeviceGetPcieReplayCounter(gpu): raise NVMLError(3)
def nvmlDeviceGetTemperature(gpu, sensor): return 44
def nvmlDeviceGetFieldValues(gpu, fields):
    return [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=gpu.get("action", 0))) for _ in fields]
'''  # fmt: skip
LIBRARIES = {"amdsmi": AMD, "pynvml": NVIDIA}


class Machine:
    """Fake libraries and GPUs, probed by a real child process at each `read`."""

    def __init__(self, folder: Path, *libraries: str, timeout: float = 30.0) -> None:
        self.folder, self.file, self.now = folder, folder / "gpus.json", 0.0
        for library in libraries:
            (folder / f"{library}.py").write_text(LIBRARIES[library])
        environment = {"PYTHONPATH": f"{folder}:{ROOT}", "FAKE_GPUS": str(self.file), "PATH": os.environ["PATH"]}
        self.probe = GpuProbe(interval=60.0, timeout=timeout, environment=environment)

    def read(self, *gpus: dict, fault: str | None = None) -> list:
        """Run one probe to its end; a minute passes between two."""
        self.file.write_text(json.dumps({"gpus": gpus, "fault": fault}))
        self.now += 60.0
        seen = self.probe.poll(self.now)
        deadline = time.monotonic() + 20
        while self.probe._child is not None:
            assert time.monotonic() < deadline
            seen += self.probe.poll(self.now + (1.0 if fault != "hang" else 31.0))
            time.sleep(0.005)
        return seen

    def starts(self) -> int:
        file = self.folder / "gpus.json.starts"
        return len(file.read_text()) if file.exists() else 0


@pytest.fixture
def machine(tmp_path):
    machines = []

    def make(*libraries: str) -> Machine:
        machines.append(Machine(tmp_path, *libraries))
        return machines[-1]

    yield make
    for made in machines:
        made.probe.close()


def codes(seen):
    return [(observation.code, observation.severity) for observation in seen]


def gpu(name="0000:0c:00.0", **counts):
    return {"name": name, **counts}


def test_a_healthy_amd_gpu_is_read_and_silent(machine):
    amd = machine("amdsmi")
    assert amd.read(gpu(correctable=4, replays=2)) == []
    [reading] = amd.probe.gpus
    assert (reading.name, reading.correctable, reading.pcie_replays) == ("0000:0c:00.0", 4, 2)
    assert (reading.temperature, reading.memory_used, reading.recovery_action) == (55, 10**9, None)
    assert reading.processes == 1
    assert not reading.lost


def test_a_healthy_nvidia_gpu_is_read_and_silent(machine):
    nvidia = machine("pynvml")
    assert nvidia.read(gpu("GPU-1"), gpu("GPU-2", correctable=7)) == []
    reading = nvidia.probe.gpus[1]
    assert (reading.index, reading.name, reading.correctable, reading.recovery_action) == (1, "GPU-2", 7, 0)
    assert (reading.temperature, reading.memory_used, reading.pcie_replays) == (44, 2 * 10**9, None)
    assert reading.processes == 2


def test_where_both_libraries_are_installed_the_one_with_gpus_is_used(machine, tmp_path):
    both = machine("amdsmi", "pynvml")
    (tmp_path / "amdsmi.py").write_text("raise KeyError('libamd_smi.so')")  # as the real one without ROCm
    assert both.read(gpu("GPU-1")) == []
    assert both.probe.gpus[0].name == "GPU-1"


@pytest.mark.parametrize("library", LIBRARIES)
def test_uncorrectable_errors_before_the_run_are_silent_and_new_ones_are_errors(machine, library):
    probed = machine(library)
    assert probed.read(gpu("a", uncorrectable=2), gpu("b")) == []
    assert probed.read(gpu("a", uncorrectable=2), gpu("b")) == []
    [seen] = probed.read(gpu("a", uncorrectable=2), gpu("b", uncorrectable=1))
    assert (seen.code, seen.severity, seen.fault) == ("gpu-uncorrectable-ecc", Severity.ERROR, FaultClass.GPU)
    assert "GPU 1 (b)" in seen.text
    assert probed.read(gpu("a"), gpu("b")) == []  # reset by the driver
    assert len(probed.read(gpu("a", uncorrectable=1), gpu("b"))) == 1


def test_corrected_errors_are_a_warning_from_a_rate_on(machine):
    amd = machine("amdsmi")
    amd.read(gpu(correctable=100))
    assert amd.read(gpu(correctable=109)) == []  # 540 an hour
    assert codes(amd.read(gpu(correctable=120))) == [("gpu-correctable-ecc", Severity.WARNING)]
    assert amd.read(gpu(correctable=0)) == []  # reset by the driver
    assert codes(amd.read(gpu(correctable=30))) == [("gpu-correctable-ecc", Severity.WARNING)]


def test_deferred_errors_and_replays_are_warnings(machine):
    amd = machine("amdsmi")
    amd.read(gpu(deferred=1, replays=5))
    assert codes(amd.read(gpu(deferred=2, replays=6))) == [
        ("gpu-deferred-ecc", Severity.WARNING), ("gpu-pcie-replay", Severity.WARNING)
    ]  # fmt: skip


def test_counts_that_the_gpu_does_not_report_are_unknown(machine):
    amd = machine("amdsmi")
    assert amd.read(gpu(unsupported=True)) == []
    assert amd.probe.gpus[0].uncorrectable is None
    assert amd.probe.gpus[0].pcie_replays is None
    assert amd.read(gpu(uncorrectable=3)) == []  # known for the first time


def test_a_gpu_that_the_driver_lost_is_fatal_once(machine):
    nvidia = machine("pynvml")
    nvidia.read(gpu("GPU-1"), gpu("GPU-2"))
    [seen] = nvidia.read(gpu("GPU-1"), gpu("GPU-2", lost=True))
    assert (seen.code, seen.severity) == ("gpu-lost", Severity.FATAL)
    assert "GPU-2" in seen.text
    assert nvidia.read(gpu("GPU-1"), gpu("GPU-2", lost=True)) == []
    assert nvidia.probe.gpus[1].lost


def test_a_gpu_that_is_gone_twice_in_a_row_is_fatal_once(machine):
    amd = machine("amdsmi")
    amd.read(gpu("a"), gpu("b"))
    assert amd.read(gpu("a")) == []
    assert amd.read(gpu("a"), gpu("b")) == []
    assert amd.read(gpu("a")) == []
    [seen] = amd.read(gpu("a"))
    assert (seen.code, seen.severity) == ("gpu-lost", Severity.FATAL)
    assert "(b)" in seen.text
    assert amd.read(gpu("a")) == []


def test_a_recovery_action_is_an_error_once_even_at_the_start(machine):
    nvidia = machine("pynvml")
    assert codes(nvidia.read(gpu("GPU-1", action=1))) == [("gpu-recovery-action", Severity.ERROR)]
    assert nvidia.read(gpu("GPU-1", action=1)) == []
    assert codes(nvidia.read(gpu("GPU-1", action=2))) == [("gpu-recovery-action", Severity.ERROR)]


@pytest.mark.parametrize(("library", "fault"), [("amdsmi", "raise"), ("pynvml", "crash")])
def test_a_failing_library_is_told_once_as_information(machine, library, fault):
    probed = machine(library)
    [seen] = probed.read(fault=fault)
    assert (seen.code, seen.severity) == ("gpu-probe-failed", Severity.INFO)
    assert {"raise": "driver not loaded", "crash": "status 13"}[fault] in seen.text
    assert probed.read(fault=fault) == []
    assert probed.starts() == 2
    assert probed.read(gpu("a")) == []
    assert probed.read(gpu("a", uncorrectable=1)) != []
    assert codes(probed.read(fault=fault)) == [("gpu-probe-failed", Severity.INFO)]


def test_a_missing_library_is_told_once_as_information(machine):
    [seen] = machine().read()
    assert (seen.code, seen.severity) == ("gpu-probe-failed", Severity.INFO)
    assert "amdsmi is not installed" in seen.text
    assert "pynvml" in seen.text


def test_a_machine_without_gpus_is_told_once(machine):
    amd = machine("amdsmi")
    [seen] = amd.read()
    assert "finds no GPU" in seen.text
    assert amd.read() == []


def test_a_probe_that_hangs_is_killed_and_told_once(machine):
    amd = machine("amdsmi")
    amd.read(gpu("a"))
    assert codes(amd.read(fault="hang")) == [("gpu-probe-timeout", Severity.INFO)]
    assert amd.read(fault="hang") == []
    assert codes(amd.read(gpu("a", uncorrectable=1))) == [("gpu-uncorrectable-ecc", Severity.ERROR)]


def test_polling_never_waits_and_one_probe_runs_at_a_time(machine):
    amd = machine("amdsmi")
    amd.file.write_text('{"fault": "hang"}')
    for now in (0.0, 1.0, 29.0):
        assert amd.probe.poll(now) == []
    child = amd.probe._child
    assert child is not None
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    amd.probe.close()
    assert child.poll() is not None


def test_an_unkillable_probe_is_never_doubled(machine, monkeypatch):
    amd = machine("amdsmi")
    amd.file.write_text('{"fault": "hang"}')
    amd.probe.poll(0.0)
    child = amd.probe._child
    assert child is not None
    with monkeypatch.context() as patched:
        patched.setattr(gpu_probe.os, "killpg", lambda *_: None)  # as for a process that waits in the kernel
        assert codes(amd.probe.poll(31.0)) == [("gpu-probe-timeout", Severity.INFO)]
        assert [amd.probe.poll(now) for now in (100.0, 200.0)] == [[], []]
        assert amd.probe._child is child
    child.kill()
    child.wait()
    assert amd.probe.poll(300.0) == []
    assert amd.probe._child is None


def test_a_probe_that_cannot_start_is_told_once(machine, monkeypatch):
    amd = machine("amdsmi")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    assert codes(amd.probe.poll(0.0) + amd.probe.poll(60.0)) == [("gpu-probe-failed", Severity.INFO)]


@pytest.mark.parametrize("output", [
    b"", b"null", b"[]", b"7", b'"text"', b"[" * 100_000, b'{"gpus": {"a": 1}}', b'{"gpus": [1]}', b'{"gpus": [{}]}',
    b'{"gpus": [{"index": 0}]}', b'{"gpus": 3}', b"\xff\xfe",
])  # fmt: skip
def test_malformed_output_is_information(output):
    assert codes(GpuProbe(60.0, 30.0)._evaluate(output, 0, 1.0)) == [("gpu-probe-failed", Severity.INFO)]


@given(st.lists(st.lists(st.fixed_dictionaries(
    {"index": st.integers(-3, 9) | st.text(max_size=2), "name": st.text(max_size=4) | st.integers()},
    optional={name: st.integers() | st.floats() | st.none() | st.text(max_size=3) | st.booleans()
              for name in ("uncorrectable", "correctable", "pcie_replays", "recovery_action", "lost")},
), max_size=4), max_size=5))  # fmt: skip
def test_no_readings_raise(readings):
    probe = GpuProbe(60.0, 30.0)
    for minute, gpus in enumerate(readings):
        for seen in probe._evaluate(json.dumps({"gpus": gpus}).encode(), 0, 60.0 * minute):
            assert seen.text.isprintable()
            assert seen.code.startswith("gpu-")
