"""Health of the GPUs, read by the vendor's library in a process of its own, since such libraries can hang or crash.

`python -m zaya_jax.aegis.gpu_probe` prints one JSON object per GPU. AMD's `amdsmi` comes with ROCm and must match it;
NVIDIA's is the package nvidia-ml-py.
"""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from zaya_jax.aegis.observation import FaultClass, Observation, Severity

_LONGEST = 2**16  # bytes of output
_COUNTERS = {
    "uncorrectable": ("gpu-uncorrectable-ecc", Severity.ERROR),
    "correctable": ("gpu-correctable-ecc", Severity.WARNING),
    "replays": ("pcie-replays", Severity.WARNING),
}


def read_amd() -> Iterator[dict[str, Any]]:
    """Yield the counters of each AMD GPU: ECC errors since boot, PCIe replays."""
    amdsmi = importlib.import_module("amdsmi")
    amdsmi.amdsmi_init()
    for index, handle in enumerate(amdsmi.amdsmi_get_processor_handles()):
        counts = amdsmi.amdsmi_get_gpu_total_ecc_count(handle)
        row = {"gpu": index, "uncorrectable": counts["uncorrectable_count"], "correctable": counts["correctable_count"]}
        with contextlib.suppress(Exception):  # not every driver counts replays
            pcie = amdsmi.amdsmi_get_pcie_info(handle)["pcie_metric"]
            row["replays"] = pcie["pcie_replay_count"]
        yield row


def read_nvidia() -> Iterator[dict[str, Any]]:
    """Yield the counters of each NVIDIA GPU: ECC errors since the driver was loaded, PCIe replays."""
    nvml = importlib.import_module("pynvml")
    nvml.nvmlInit()
    for index in range(nvml.nvmlDeviceGetCount()):
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        row: dict[str, Any] = {"gpu": index}
        for name, kind in (("uncorrectable", nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
                           ("correctable", nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED)):  # fmt: skip
            with contextlib.suppress(nvml.NVMLError):  # no ECC on this model
                row[name] = nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC)
        with contextlib.suppress(nvml.NVMLError):
            row["replays"] = nvml.nvmlDeviceGetPcieReplayCounter(handle)
        yield row


class GpuProbe:
    """Starts the probe every `interval` seconds, and compares its counters with those of the last one."""

    def __init__(self, interval: float, timeout: float) -> None:
        """Probe every `interval` seconds; a probe that takes longer than `timeout` seconds is killed."""
        self._interval, self._timeout = interval, timeout
        self._process: subprocess.Popen[bytes] | None = None
        self._started = float("-inf")
        self._output = b""
        self._last: dict[int, dict[str, int]] = {}
        self._told: set[str] = set()

    @property
    def pids(self) -> list[int]:
        """The probe that runs now."""
        return [] if self._process is None else [self._process.pid]

    def poll(self, now: float) -> list[Observation]:
        """Start a probe if one is due, or return what one that has ended tells; never waits."""
        if self._process is None:
            if now - self._started >= self._interval and "gpu-probe-missing" not in self._told:
                self._start(now)
            return []
        assert self._process.stdout is not None  # noqa: S101 (for the type checker)
        with contextlib.suppress(BlockingIOError):
            while len(self._output) < _LONGEST and (content := os.read(self._process.stdout.fileno(), _LONGEST)):
                self._output += content
        if self._process.poll() is None:
            if now - self._started < self._timeout and len(self._output) < _LONGEST:
                return []
            self.close()
            return self._tell("gpu-probe-timeout", f"The GPU probe did not end within {self._timeout:g} s.")
        status = self._process.returncode
        self.close()
        if status:
            said = self._output.decode(errors="replace").strip() or f"The GPU probe ended with status {status}."
            return self._tell("gpu-probe-missing" if status == 3 else "gpu-probe-failed", said)
        return self._compare()

    def close(self) -> None:
        """Kill the probe if it runs."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def _start(self, now: float) -> None:
        self._started, self._output = now, b""
        self._process = subprocess.Popen(
            [sys.executable, "-m", "zaya_jax.aegis.gpu_probe"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        assert self._process.stdout is not None  # noqa: S101 (for the type checker)
        os.set_blocking(self._process.stdout.fileno(), False)

    def _compare(self) -> list[Observation]:
        rows: dict[int, dict[str, int]] = {}
        try:
            for line in self._output.splitlines():
                row = json.loads(line)
                rows[int(row["gpu"])] = {name: int(row[name]) for name in _COUNTERS if name in row}
        except (ValueError, KeyError, TypeError, RecursionError):
            return self._tell("gpu-probe-failed", "The output of the GPU probe is not what it should be.")
        seen = []
        for gpu, before in self._last.items():
            if gpu not in rows:
                text = f"GPU {gpu} is gone."
                seen.append(Observation("gpu-lost", FaultClass.GPU, Severity.FATAL, text, gpu))
                continue
            for name, (code, severity) in _COUNTERS.items():
                if name in before and name in rows[gpu] and (more := rows[gpu][name] - before[name]) > 0:
                    text = f"GPU {gpu}: {name} errors rose by {more} to {rows[gpu][name]}."
                    seen.append(Observation(code, FaultClass.GPU, severity, text, gpu))
        self._last = rows
        return seen

    def _tell(self, code: str, text: str) -> list[Observation]:
        if code in self._told:
            return []
        self._told.add(code)
        return [Observation(code, FaultClass.GPU, Severity.INFO, text)]


def main() -> int:
    """Print the counters of every GPU; 3 if there is no vendor library."""
    for name, read in (("amdsmi", read_amd), ("pynvml", read_nvidia)):
        try:
            importlib.import_module(name)
        except ImportError:
            continue
        for row in read():
            print(json.dumps(row), flush=True)
        return 0
    print("Neither amdsmi (part of ROCm) nor nvidia-ml-py is installed, so the GPUs are not watched.")
    return 3


if __name__ == "__main__":
    sys.exit(main())
