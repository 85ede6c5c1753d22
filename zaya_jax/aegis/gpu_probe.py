"""Probe the health of GPUs in a child process, because a vendor's library can hang on a sick GPU.

`python -m zaya_jax.aegis.gpu_probe` prints one JSON object, and `GpuProbe` runs it at intervals. The library is
`amdsmi`, which comes with ROCm, or `pynvml`, which comes with the package nvidia-ml-py.
"""

import contextlib
import dataclasses
import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import IO, Any, cast

from zaya_jax.aegis.failure import FaultClass, Observation, Severity

_PIPE = 1 << 16  # bytes that a pipe holds: more than the readings, so the child never waits for a reader
_MOST_GPUS = 128
_LIFETIME = 600.0  # seconds after which a probe ends itself, if its parent is gone
_COUNTERS = {  # field of `Gpu` → what is observed when it rises
    "uncorrectable": ("gpu-uncorrectable-ecc", Severity.ERROR, "Uncorrectable memory errors"),
    "correctable": ("gpu-correctable-ecc", Severity.WARNING, "Corrected memory errors"),
    "deferred": ("gpu-deferred-ecc", Severity.WARNING, "Deferred memory errors"),
    "pcie_replays": ("gpu-pcie-replay", Severity.WARNING, "Repeated PCI Express transfers"),
}
_STATES = ("temperature", "memory_used", "processes", "recovery_action")
_CORRECTABLE_PER_HOUR = 600.0  # corrected errors from which a warning is due


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A reading of one GPU. Counts are since the driver was loaded; None where the GPU does not report them."""

    index: int  # position among the GPUs of the library
    name: str  # bus address (AMD) or UUID (NVIDIA), which stays the same; empty for a lost GPU that cannot tell it
    uncorrectable: int | None = None  # uncorrectable memory errors
    correctable: int | None = None  # corrected memory errors
    deferred: int | None = None  # memory errors that are found but not used yet (AMD)
    pcie_replays: int | None = None  # repeated transfers on the PCI Express link
    temperature: int | None = None  # in °C
    memory_used: int | None = None  # in bytes
    processes: int | None = None  # number of processes that compute on it
    recovery_action: int | None = None  # what NVIDIA's driver demands, such as 1 for a reset; 0 is nothing
    lost: bool = False  # whether the driver lost the GPU


class GpuProbe:
    """Runs the probe at intervals and compares its readings; no failure of it ends the supervisor."""

    def __init__(self, interval: float, timeout: float, environment: Mapping[str, str] | None = None) -> None:
        """Start a probe every `interval` seconds, in `environment`, and kill it after `timeout` seconds."""
        self.gpus: list[Gpu] = []  # the newest reading
        self._interval, self._timeout, self._environment = interval, timeout, environment
        self._child: subprocess.Popen[bytes] | None = None
        self._started, self._next = 0.0, float("-inf")
        self._killed = self._failed = False  # this child was killed; the last probe failed, which was reported
        self._known: dict[str, Gpu] = {}  # the last reading of each GPU by name
        self._read_at: float | None = None
        self._missing: dict[str, int] = {}  # readings in a row without a GPU that was there

    @property
    def pids(self) -> list[int]:
        """The probe that runs now."""
        return [] if self._child is None else [self._child.pid]

    def poll(self, now: float) -> list[Observation]:
        """Start a probe if one is due, or read what it printed, without waiting; return what changed.

        `now` is monotonic, in seconds. A failing probe is reported once, as information, until one succeeds.
        """
        if self._child is None:
            return self._start(now) if now >= self._next else []
        status = self._child.poll()
        if status is None:
            if now - self._started <= self._timeout:
                return []
            self._kill(self._child)  # a child that hangs in the kernel ends later, or never
            return self._fail("gpu-probe-timeout", f"The GPU probe was killed after {self._timeout:g} s.")
        output = self._finish(self._child)
        return [] if self._killed else self._evaluate(output, status, now)

    def close(self) -> None:
        """End a running probe."""
        if self._child is not None:
            self._kill(self._child)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(1.0)
            self._finish(self._child)

    def _start(self, now: float) -> list[Observation]:
        self._started, self._next, self._killed = now, now + self._interval, False
        argv, null = [sys.executable, "-m", "zaya_jax.aegis.gpu_probe"], subprocess.DEVNULL
        try:
            self._child = subprocess.Popen(  # noqa: S603 (an argument list, without a shell)
                argv, stdin=null, stdout=subprocess.PIPE, stderr=null, env=self._environment, start_new_session=True
            )
        except OSError as error:
            return self._fail("gpu-probe-failed", f"The GPU probe did not start: {error.strerror or error}.")
        return []

    def _finish(self, child: subprocess.Popen[bytes]) -> bytes:
        """Return what the child has printed; nothing waits, since it does not pass the pipe on."""
        self._child = None
        with cast("IO[bytes]", child.stdout) as pipe:
            return b"" if child.returncode is None else os.read(pipe.fileno(), _PIPE)

    def _kill(self, child: subprocess.Popen[bytes]) -> None:
        if not self._killed:
            self._killed = True
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # not reaped yet, so the id is still its own

    def _fail(self, code: str, text: str) -> list[Observation]:
        observations = [] if self._failed else [Observation(code, FaultClass.GPU, Severity.INFO, text)]
        self._failed = True
        return observations

    def _evaluate(self, output: bytes, status: int, now: float) -> list[Observation]:
        try:
            document = json.loads(output)
            problem, gpus = str(document.get("problem", "")), [_checked(gpu) for gpu in document.get("gpus", [])]
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return self._fail("gpu-probe-failed", f"The GPU probe ended with status {status} and no readings.")
        if problem:
            return self._fail("gpu-probe-failed", f"GPUs are not probed: {problem}")
        self._failed = False
        elapsed = None if self._read_at is None else max(1e-3, now - self._read_at)
        names = {gpu.index: name for name, gpu in self._known.items()}
        self.gpus = [
            gpu if gpu.name else dataclasses.replace(gpu, name=names.get(gpu.index, f"index {gpu.index}"))
            for gpu in gpus[:_MOST_GPUS]
        ]
        self._read_at = now
        seen = [change for gpu in self.gpus for change in self._compare(gpu, self._known.get(gpu.name), elapsed)]
        seen += self._find_missing()
        self._known |= {gpu.name: gpu for gpu in self.gpus if gpu.name in self._known or len(self._known) < _MOST_GPUS}
        return seen

    def _compare(self, gpu: Gpu, old: Gpu | None, elapsed: float | None) -> list[Observation]:
        label, seen = f"GPU {gpu.index} ({gpu.name})", []
        if gpu.lost and not (old and old.lost):
            seen.append(_observe("gpu-lost", Severity.FATAL, f"The driver lost {label}.", gpu.index))
        if gpu.recovery_action and not (old and old.recovery_action == gpu.recovery_action):
            text = f"The driver demands recovery action {gpu.recovery_action} for {label}."
            seen.append(_observe("gpu-recovery-action", Severity.ERROR, text, gpu.index))
        if old is None or elapsed is None:
            return seen  # errors before the run
        for name, (code, severity, what) in _COUNTERS.items():
            before, count = getattr(old, name), getattr(gpu, name)
            rise = 0 if before is None or count is None else max(0, count - before)  # 0 if the driver reset it
            if rise >= (_CORRECTABLE_PER_HOUR * elapsed / 3600 if name == "correctable" else 1):
                seen.append(_observe(code, severity, f"{what} of {label} in {elapsed:.0f} s: {rise}.", gpu.index))
        return seen

    def _find_missing(self) -> list[Observation]:
        """Report a GPU as lost at the second reading in a row that lacks it; one reading may be incomplete."""
        present = {gpu.name for gpu in self.gpus}
        self._missing = {name: self._missing.get(name, 0) + 1 for name in self._known if name not in present}
        twice = [self._known[name] for name, readings in self._missing.items() if readings == 2]
        gone = [(gpu.index, f"GPU {gpu.index} ({gpu.name}) is gone.") for gpu in twice if not gpu.lost]
        return [_observe("gpu-lost", Severity.FATAL, text, index) for index, text in gone]


def _observe(code: str, severity: Severity, text: str, gpu: int) -> Observation:
    return Observation(code, FaultClass.GPU, severity, text, device=gpu)


def _checked(values: Any) -> Gpu:
    """Return the reading of a GPU in the probe's output; values of another type than expected become None."""
    numbers = {name: _count(values.get(name)) for name in (*_COUNTERS, *_STATES)}
    return Gpu(_count(values["index"]) or 0, str(values["name"])[:100], lost=values.get("lost") is True, **numbers)


def _count(value: Any) -> int | None:
    is_count = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 2**64 - 1
    return int(value) if is_count else None  # drivers write the largest integer for "unknown"


def _read_amd(amdsmi: Any) -> list[Gpu]:
    """Read AMD's GPUs. The library has no word for a lost GPU: it is no longer listed."""

    def read(index: int, handle: Any) -> Gpu:
        errors = _try(lambda: amdsmi.amdsmi_get_gpu_total_ecc_count(handle)) or {}
        sensor = amdsmi.AmdSmiTemperatureType.HOTSPOT, amdsmi.AmdSmiTemperatureMetric.CURRENT
        memory = amdsmi.AmdSmiMemoryType.VRAM
        return Gpu(
            index,
            str(amdsmi.amdsmi_get_gpu_device_bdf(handle)),
            uncorrectable=_count(errors.get("uncorrectable_count")),
            correctable=_count(errors.get("correctable_count")),
            deferred=_count(errors.get("deferred_count")),
            pcie_replays=_try_count(lambda: amdsmi.amdsmi_get_pcie_info(handle)["pcie_metric"]["pcie_replay_count"]),
            temperature=_try_count(lambda: amdsmi.amdsmi_get_temp_metric(handle, *sensor)),
            memory_used=_try_count(lambda: amdsmi.amdsmi_get_gpu_memory_usage(handle, memory)),
            processes=_try_count(lambda: len(amdsmi.amdsmi_get_gpu_process_list(handle))),
        )

    amdsmi.amdsmi_init()
    return [read(index, handle) for index, handle in enumerate(amdsmi.amdsmi_get_processor_handles())]


def _read_nvidia(nvml: Any) -> list[Gpu]:
    nvml.nvmlInit()
    return [_nvidia_gpu(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]


def _nvidia_gpu(nvml: Any, index: int) -> Gpu:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        name = str(nvml.nvmlDeviceGetUUID(handle))
        used = nvml.nvmlDeviceGetMemoryInfo(handle).used
    except nvml.NVMLError as error:
        if getattr(error, "value", None) != nvml.NVML_ERROR_GPU_IS_LOST:
            raise
        return Gpu(index, "", lost=True)

    def errors(kind: int) -> int | None:
        return _try_count(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_VOLATILE_ECC))

    def recovery_action() -> int | None:
        [field] = nvml.nvmlDeviceGetFieldValues(handle, [nvml.NVML_FI_DEV_GET_GPU_RECOVERY_ACTION])
        return field.value.uiVal if field.nvmlReturn == nvml.NVML_SUCCESS else None

    return Gpu(
        index,
        name,
        uncorrectable=errors(nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        correctable=errors(nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
        pcie_replays=_try_count(lambda: nvml.nvmlDeviceGetPcieReplayCounter(handle)),
        temperature=_try_count(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        memory_used=_count(used),
        processes=_try_count(lambda: len(nvml.nvmlDeviceGetComputeRunningProcesses(handle))),
        recovery_action=_try_count(recovery_action),
    )


def _try(read: Callable[[], Any]) -> Any:
    """Return what `read` returns; None if this GPU or this version of the library does not support it."""
    try:
        return read()
    except Exception:  # each library has its own errors
        return None


def _try_count(read: Callable[[], Any]) -> int | None:
    return _count(_try(read))


def read_gpus() -> dict[str, Any]:
    """Read all GPUs of this machine through the first library that finds any; to be called in a child process."""
    problems = []
    for library, read in {"amdsmi": _read_amd, "pynvml": _read_nvidia}.items():
        try:
            if gpus := read(importlib.import_module(library)):
                return {"library": library, "gpus": [dataclasses.asdict(gpu) for gpu in gpus]}
            problems.append(f"{library} finds no GPU")
        except ModuleNotFoundError:
            problems.append(f"{library} is not installed")
        except Exception as error:  # each library has its own errors
            problems.append(f"{library} raised {type(error).__name__}: {' '.join(str(error).split())[:150]}")
    return {"problem": f"{'; '.join(problems)}."}


def main() -> None:
    """Print the readings as JSON; what the libraries print goes to standard error."""
    signal.setitimer(signal.ITIMER_REAL, _LIFETIME)
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)
        json.dump(read_gpus(), output)
    os._exit(0)  # a library's clean-up may hang too


if __name__ == "__main__":
    main()
