"""Make faults in a run under the real supervisor, on the device that trains: what it detects, and how long that takes.

A drill kills the process, lets the device compute for ever, and lets the host's memory run out; the run must end as an
undisturbed one, bit for bit. A second run needs more memory than the device has, and must be stopped.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_report.temporary import temporary_folder
from benchmarks.gpu_report.tiny import CONTEXT, ONE_DEVICE, TINY, text_folder
from zaya_jax.aegis.events import EVENTS, read_events
from zaya_jax.aegis.state import VERDICT
from zaya_jax.aegis.supervision_report import node_folders
from zaya_jax.config import from_dict, to_yaml
from zaya_jax.errors import InputError
from zaya_jax.hardware.detection import select_preset
from zaya_jax.hardware.environment import apply_preset
from zaya_jax.lab.subprocesses import restored_environment
from zaya_jax.run.files import read_json, read_object
from zaya_jax.run.folder import TIMINGS
from zaya_jax.run.metrics import read_rows

_STEPS, _EVERY = 24, 4  # steps of the run, and between two checkpoints
_FAULTS = ("sigkill@0:5:dispatch", "device-hang@0:10:device_wait", "host-memory@0:15:data")
_STOPPED = 93  # exit code of the supervisor when the device's memory does not suffice (docs/aegis.md)
_HANG_SECONDS = {True: 5.0, False: 10.0}  # timeout of the phases of a step, by `small`
_PROBE_SECONDS = 30.0  # that a reading of the GPUs may take
_FREED = 100e6  # bytes by which used memory may differ between two times at which nothing runs
_WARM_UP = 2  # steps that are not timed after a start
_GB = 1e9


class Reading(NamedTuple):
    """A reading of all GPUs of the machine, between two times of `time.monotonic`."""

    begun: float
    ended: float
    gpus: Sequence[Mapping[str, Any]]  # see `aegis.gpu_probe.Gpu`

    def total(self, field: str) -> int | None:
        """Return the sum of a field over the GPUs; None if one does not report it."""
        values = [value for gpu in self.gpus if isinstance(value := gpu.get(field), int)]
        return sum(values) if len(values) == len(self.gpus) else None


class GpuReadings:
    """Reads the GPUs again and again, through the supervisor's probe, while a folder exists.

    Attributes:
      all: readings so far, oldest first.
      problem: why the GPUs cannot be read, a sentence; empty if they can.
    """

    def __init__(self, folder: Path) -> None:
        """Prepare to read while `folder` exists."""
        self.all: list[Reading] = []
        self.problem = ""
        self._folder, self._stop = folder, threading.Event()

    def read(self) -> None:
        """Read once."""
        begun = time.monotonic()
        try:
            done = subprocess.run([sys.executable, "-m", "zaya_jax.aegis.gpu_probe"], stdin=subprocess.DEVNULL,
                                  capture_output=True, timeout=_PROBE_SECONDS, check=False)  # fmt: skip
            document: dict[str, Any] = json.loads(done.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            document = {"problem": f"the probe failed ({type(error).__name__})."}
        if problem := document.get("problem", ""):
            self.problem = f"GPUs are not read: {problem}"
        else:
            self.all.append(Reading(begun, time.monotonic(), document["gpus"]))

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """Read beside the block."""
        thread = threading.Thread(target=self._run, name="gpu-readings", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join(_PROBE_SECONDS)

    def _run(self) -> None:
        while not self.problem and not self._stop.wait(0.1):
            if self._folder.exists():
                self.read()


def measure_supervisor(small: bool, seconds: float = 105.0) -> dict[str, Any]:
    """Make the faults, each once; everything is in a temporary folder.

    Args:
      small: whether to train a tiny model on a CPU, whose memory is that of the host.
      seconds: that this may take on a GPU; if the drill takes them, device memory does not run out.

    Returns:
      For JSON: the score-card of the `drill`, the end of the run without device memory (`device_memory`), the
      `counters` of the GPUs beside a step, what the supervisor said of them (`gpu_events`), `figures` (value and unit
      by name), and `notes`, sentences on what could not be measured. `failed`: a sentence, if something is wrong.
    """
    start = time.monotonic()
    with temporary_folder("supervisor") as folder, restored_environment():
        apply_preset(select_preset(None))  # like zaya_jax.main
        os.environ |= {**ONE_DEVICE, "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
                       "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # fmt: skip
        config = folder / "run.yaml"
        config.write_text(_make_config(folder, small), encoding="utf-8")
        readings = GpuReadings(folder / "drill" / "disturbed")
        readings.read()
        try:
            with readings.beside():
                card = _drill(folder, config, _HANG_SECONDS[small])
            needed = 1.2 * max((row["recover"] or 0.0 for row in card["times"]), default=0.0)  # as a restart takes
            if small:
                alone = "A CPU has no device memory that could run out."
            elif time.monotonic() + needed > start + seconds:
                alone = "There was no time to let device memory run out."
            else:
                alone = _run_out_of_device_memory(folder, config)
        except InputError as error:
            return {"figures": {}, "notes": [], "failed": str(error)}
        if not readings.problem:
            readings.read()
        events = _events(folder / "drill" / "disturbed")
        steps = {run: _step_seconds(folder / "drill" / run) for run in ("undisturbed", "disturbed")}
    return describe(card, alone, events, readings.all, readings.problem, steps)


def _make_config(folder: Path, small: bool) -> str:
    """Return the YAML of a small run: tiny on a CPU, with the kernels' sizes and bf16 on a GPU."""
    context = CONTEXT if small else 512
    model = {
        "vocab_size": 2048, "hidden_size": 512, "num_layers": 4, "num_query_heads": 8, "num_kv_heads": 2,
        "head_dim": 64, "num_experts": 16, "expert_size": 512, "router_size": 128, "max_positions": context,
        "rope_base": 1.0e4,
    }  # fmt: skip
    batch = 8 * context
    return to_yaml(from_dict({
        **(TINY if small else {"model": model}),
        "phases": [{"tokens": _STEPS * batch, "schedule": {"shape": "constant", "warmup_tokens": 2 * batch}}],
        "data": {"corpus": text_folder(), "heldout_fraction": 0.2, "context": context,
                 "cache_dir": str(folder / "data")},
        "train": {"batch": {"tokens": batch}, "compute_dtype": "float32" if small else "bfloat16", "remat": "dots"},
        "evaluation": {"every": _STEPS, "batches": 1, "batch_size": 8}, "checkpoint": {"every": _EVERY},
        "sample": {"tokens": 0},
    }))  # fmt: skip


def _drill(folder: Path, config: Path, hang: float) -> dict[str, Any]:
    """Run the drill, and return its score-card."""
    output = folder / "card.json"
    faults = [text for fault in _FAULTS for text in ("--fault", fault)]
    done = _aegis("drill", "--folder", str(folder / "drill"), "--processes", "1", "--hang-seconds", f"{hang:g}",
                  "--output", str(output), *faults, "--", "--config", str(config))  # fmt: skip
    if not output.exists():
        lines = [path.read_text(encoding="utf-8", errors="replace") for path in (folder / "drill").glob("*.log")]
        raise InputError(f"The drill ended with status {done.returncode}: {(done.stderr + ''.join(lines))[-800:]}")
    return read_object(output)


def _run_out_of_device_memory(folder: Path, config: Path) -> dict[str, Any]:
    """Train until the device's memory runs out; return how the supervisor ended, and seconds until it noticed."""
    run_dir, marks = folder / "device-memory", folder / "marks"
    marks.mkdir()
    command = [sys.executable, "-m", "zaya_jax.aegis.faults", "device-memory@0:3:dispatch", "--", "--config",
               str(config), f"run_dir={run_dir}"]  # fmt: skip
    done = _aegis("run", "--run-dir", str(run_dir), "--", *command, AEGIS_DRILL_MARKS=str(marks))
    events = _events(run_dir)
    made = next((event for event in events if event["kind"] == "inject"), None)
    end = next((event for event in reversed(events) if event["kind"] == "end"), {})
    detect = next((event for event in events if event["id"] == end.get("cause")), None)
    seconds = None if made is None or detect is None else detect["monotonic"] - made["made_at"]
    verdicts = [read_json(node / VERDICT) for node in node_folders(run_dir)]
    return {"status": done.returncode, "class": end.get("fault"), "code": end.get("code"), "text": end.get("text"),
            "verdict": verdicts[0] if verdicts else None, "seconds": seconds}  # fmt: skip


def _aegis(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "zaya_jax.aegis", *arguments]
    return subprocess.run(command, env={**os.environ, **variables}, stdin=subprocess.DEVNULL, capture_output=True,  # noqa: S603
                          text=True, check=False)  # fmt: skip


def _events(run_dir: Path) -> list[dict[str, Any]]:
    return [event for node in node_folders(run_dir) for event in read_events(node / EVENTS)]


def _step_seconds(run_dir: Path) -> list[float]:
    return [row["seconds"] for row in read_rows(run_dir / TIMINGS)][_WARM_UP:]


# --- what follows from it --------------------------------------------------------------------------------------


def describe(
    card: Mapping[str, Any], alone: Mapping[str, Any] | str, events: Sequence[Mapping[str, Any]],
    readings: Sequence[Reading], unread: str, steps: Mapping[str, Sequence[float]],
) -> dict[str, Any]:  # fmt: skip
    """Describe a drill and the run without device memory.

    Args:
      card: score-card of the drill.
      alone: how the run without device memory ended; if it was not made, a sentence.
      events: of the disturbed run.
      readings: of the GPUs: the first before the drill, the last after everything, the others in the disturbed run.
      unread: why there are none, or no more, a sentence; empty if all were made.
      steps: seconds of the steps of the `undisturbed` run, without readings, and of the `disturbed` run, with them.
    """
    figures: dict[str, Any] = {}
    for row in card["times"]:
        name = row["fault"].partition("@")[0]
        for key, what in (("since_fault", "detected"), ("recover", "next step")):
            figures[f"{name}: {what}"] = [row[key], "s"]
    figures["false alarms"] = [card["false_alarms"], ""]
    figures["bitwise identical"] = [int(card["identical"]), ""]
    problems, notes = _drill_problems(card), [unread] if unread else []
    if isinstance(alone, str):
        notes.append(alone)
    else:
        figures["device-memory: detected"] = [alone["seconds"], "s"]
        if (alone["status"], alone["class"]) != (_STOPPED, "device_memory"):
            problems.append(f"Without device memory the supervisor ended with {alone['status']} and class "
                            f"{alone['class']}, but should end with {_STOPPED} and device_memory.")  # fmt: skip
    said = [f"{event['code']}: {event['text']}" for event in events if event.get("fault") == "gpu"]
    result = {"drill": card, "device_memory": alone, "figures": figures, "notes": notes, "counters": [],
              "gpu_events": said}  # fmt: skip
    if readings:
        medians = [statistics.median(steps[run]) for run in ("disturbed", "undisturbed")]
        figures["step beside readings of the GPU"] = [round(medians[0] / medians[1], 3), "×"]
        busiest = max(readings, key=lambda reading: reading.total("memory_used") or 0)
        result |= {"counters": busiest.gpus, "step_seconds": {run: list(each) for run, each in steps.items()}}
        if not unread:  # the last reading is then the one after everything
            problems += _memory_problems(events, readings, figures, notes)
    return result | ({"failed": " ".join(problems)} if problems else {})


def _drill_problems(card: Mapping[str, Any]) -> list[str]:
    """Return what is wrong with a score-card, as sentences."""
    problems = []
    if card["made"] != card["faults"]:
        problems.append(f"Only {card['made']} of {card['faults']} faults were made.")
    problems += [f"{row['fault']} was taken for {row['said']}." for row in card["missed"]]
    if card["false_alarms"]:
        problems.append(f"There were {card['false_alarms']} false alarms.")
    if not card["identical"]:
        problems.append("The disturbed run is not bitwise the undisturbed one.")
    return problems


def _memory_problems(
    events: Sequence[Mapping[str, Any]], readings: Sequence[Reading], figures: dict[str, Any], notes: list[str]
) -> list[str]:
    """Compare used memory at each restart and at the end with that before the drill, and the numbers of processes.

    The new process has not reached the GPU when it is read for the first time, as Python and jax start more slowly.
    """
    first, last, problems = readings[0], readings[-1], []
    starts = [event["monotonic"] for event in events if event["kind"] == "start"][1:]
    restarts = [next((each for each in readings if each.begun > start), last) for start in starts]
    used = {f"restart {index}": each.total("memory_used") for index, each in enumerate(restarts, 1)}
    used["end"] = last.total("memory_used")
    before = first.total("memory_used")
    left = {place: value - before for place, value in used.items() if value is not None and before is not None}
    if len(left) < len(used):
        notes.append("The GPU does not report its used memory.")
    if left:
        figures["memory left at a restart"] = [round(max(left.values()) / _GB, 3), "GB"]
    problems += [f"At {place}, {value / _GB:.3g} GB of the GPU's memory were not free again."
                 for place, value in left.items() if value > _FREED]  # fmt: skip
    count, earlier = last.total("processes"), first.total("processes")
    if count is None or earlier is None:
        notes.append("The GPU does not report its processes.")
    else:
        figures["processes left on the GPU"] = [count - earlier, ""]
        if count > earlier:
            problems.append(f"Processes are left on the GPU: {count - earlier}.")
    return problems
