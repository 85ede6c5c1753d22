"""Make faults in a run under the real supervisor, on the device that trains: what it detects, and how long that takes.

The run must end as an undisturbed one, bit for bit. A second one needs more memory than the device has, and must stop.
"""

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_report.runs import CONTEXT, MEDIUM, SMALL_TEXT, TINY, folder_of_runs, make_config
from zaya_jax.aegis.events import EVENTS, read_events
from zaya_jax.aegis.state import VERDICT
from zaya_jax.aegis.supervision_report import node_folders
from zaya_jax.config import Config, to_yaml
from zaya_jax.errors import InputError
from zaya_jax.run.files import read_json, read_object

_STEPS, _EVERY = 24, 4  # steps of the run, and between two checkpoints
_FAULTS = ("sigkill@0:5:dispatch", "device-hang@0:10:device_wait", "host-memory@0:15:data")
_STOPPED = 93  # exit code of the supervisor when the device's memory does not suffice (docs/aegis.md)
_PROBE_SECONDS = 30.0  # that a reading of the GPUs may take
_FREED = 100e6  # bytes by which used memory may differ between two times at which nothing runs
Card = Mapping[str, Any]
Gpus = Sequence[Card] | str  # see `read_gpus`


def read_gpus() -> list[dict[str, Any]] | str:
    """Read all GPUs through the supervisor's probe, see `aegis.gpu_probe.Gpu`; a sentence if they cannot be read."""
    try:
        document: dict[str, Any] = json.loads(_run("zaya_jax.aegis.gpu_probe", timeout=_PROBE_SECONDS).stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired) as error:
        document = {"problem": f"the probe failed ({type(error).__name__})."}
    return f"GPUs are not read: {document['problem']}" if document.get("problem") else document["gpus"]


def measure_supervisor(small: bool, seconds: float = 105.0) -> dict[str, Any]:
    """Make the faults, each once, in a tiny run on a CPU (`small`), whose memory is that of the host.

    On a GPU this takes at most so many seconds; if the drill takes them, device memory does not run out.
    """
    start = time.monotonic()
    with folder_of_runs("supervisor") as folder:
        config = folder / "run.yaml"
        config.write_text(to_yaml(_make_config(folder, small)), encoding="utf-8")
        before = read_gpus()
        try:
            card = _drill(folder, config, 5.0 if small else 10.0)
            needed = 1.2 * max((row["recover"] or 0.0 for row in card["times"]), default=0.0)  # as a restart takes
            if small:
                alone = "A CPU has no device memory that could run out."
            elif time.monotonic() + needed > start + seconds:
                alone = "There was no time to let device memory run out."
            else:
                alone = _run_out_of_device_memory(folder, config)
        except InputError as error:
            return {"figures": {}, "notes": [], "failed": str(error)}
        events = _events(folder / "drill" / "disturbed")
    return describe(card, alone, events, before, read_gpus())


def _make_config(folder: Path, small: bool) -> Config:
    """Make a short run: tiny on a CPU, with the kernels' sizes and bf16 on a GPU."""
    model, context, dtype = (TINY, CONTEXT, "float32") if small else (MEDIUM, 512, "bfloat16")
    changes = [f"data.cache_dir={folder / 'data'}", f"checkpoint.every={_EVERY}", "sample.tokens=0"]
    return make_config(model, context, 8, _STEPS, _STEPS, dtype, [*SMALL_TEXT, *changes])


def _drill(folder: Path, config: Path, hang: float) -> dict[str, Any]:
    """Run the drill with a timeout of so many seconds for each phase of a step, and return its score-card."""
    output, drill = folder / "card.json", folder / "drill"
    faults = [text for fault in _FAULTS for text in ("--fault", fault)]
    flags = ["--folder", str(drill), "--processes", "1", "--hang-seconds", f"{hang:g}", "--output", str(output)]
    done = _run("zaya_jax.aegis", "drill", *flags, *faults, "--", "--config", str(config))
    if not output.exists():
        lines = [path.read_text(encoding="utf-8", errors="replace") for path in drill.glob("*.log")]
        raise InputError(f"The drill ended with status {done.returncode}: {(done.stderr + ''.join(lines))[-800:]}")
    return read_object(output)


def _run_out_of_device_memory(folder: Path, config: Path) -> dict[str, Any]:
    """Train until the device's memory runs out; return how the supervisor ended, and seconds until it noticed."""
    run_dir, marks = folder / "device-memory", folder / "marks"
    marks.mkdir()
    trainer = [sys.executable, "-m", "zaya_jax.aegis.faults", "device-memory@0:3:dispatch", "--", "--config"]
    arguments = ["run", "--run-dir", str(run_dir), "--", *trainer, str(config), f"run_dir={run_dir}"]
    done = _run("zaya_jax.aegis", *arguments, AEGIS_DRILL_MARKS=str(marks))
    events = _events(run_dir)
    made = next((event for event in events if event["kind"] == "inject"), None)
    end = next((event for event in reversed(events) if event["kind"] == "end"), {})
    detect = next((event for event in events if event["id"] == end.get("cause")), None)
    return {
        "status": done.returncode,
        "class": end.get("fault"),
        "code": end.get("code"),
        "text": end.get("text"),
        "verdict": next((read_json(node / VERDICT) for node in node_folders(run_dir)), None),
        "seconds": None if made is None or detect is None else detect["monotonic"] - made["made_at"],
    }


def _run(
    module: str, *arguments: str, timeout: float | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    command, environment = [sys.executable, "-m", module, *arguments], {**os.environ, **variables}
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    return subprocess.run(command, env=environment, timeout=timeout, check=False, **streams)  # noqa: S603


def _events(run_dir: Path) -> list[dict[str, Any]]:
    return [event for node in node_folders(run_dir) for event in read_events(node / EVENTS)]


# --- what follows from it --------------------------------------------------------------------------------------


def describe(card: Card, alone: Card | str, events: Sequence[Card], before: Gpus, after: Gpus) -> dict[str, Any]:
    """Describe a drill by its score-card and events, and the run without device memory; a sentence if it was not made.

    Returns the card, the `counters` of the GPUs afterwards, what the supervisor said of them (`gpu_events`), `figures`,
    and `notes` on what could not be measured. `failed`: a sentence, if something is wrong.
    """
    figures: dict[str, Any] = {}
    for row in card["times"]:
        name = row["fault"].partition("@")[0]
        figures |= {f"{name}: detected": [row["since_fault"], "s"], f"{name}: next step": [row["recover"], "s"]}
    figures |= {"false alarms": [card["false_alarms"], ""], "bitwise identical": [int(card["identical"]), ""]}
    problems, notes = _drill_problems(card), [each for each in (before, after) if isinstance(each, str)][:1]
    if isinstance(alone, str):
        notes.append(alone)
    else:
        figures["device-memory: detected"] = [alone["seconds"], "s"]
        if (alone["status"], alone["class"]) != (_STOPPED, "device_memory"):
            end = f"{alone['status']} and class {alone['class']}, but should end with {_STOPPED} and device_memory"
            problems.append(f"Without device memory the supervisor ended with {end}.")
    if not isinstance(before, str) and not isinstance(after, str):
        for field, allowed in (("memory_used", _FREED), ("processes", 0)):
            counts: list[list[Any]] = [[gpu.get(field) for gpu in gpus] for gpus in (before, after)]
            if None in itertools.chain(*counts):
                notes.append(f"The GPU does not report {field}.")
                continue
            left, name = sum(counts[1]) - sum(counts[0]), f"{field.replace('_', ' ')} left on the GPU"
            figures[name] = [left, "bytes" if field == "memory_used" else ""]
            if left > allowed:
                problems.append(f"There is {name}: {left:,}.")
    said = [f"{event['code']}: {event['text']}" for event in events if event.get("fault") == "gpu"]
    result = {"drill": card, "device_memory": alone, "figures": figures, "notes": notes, "gpu_events": said}
    result["counters"] = [] if isinstance(after, str) else after
    return result | ({"failed": " ".join(problems)} if problems else {})


def _drill_problems(card: Card) -> list[str]:
    """Return what is wrong with a score-card, as sentences."""
    checks = [
        (card["made"] != card["faults"], f"Only {card['made']} of {card['faults']} faults were made."),
        *((True, f"{row['fault']} was taken for {row['said']}.") for row in card["missed"]),
        (card["false_alarms"], f"There were {card['false_alarms']} false alarms."),
        (not card["identical"], "The disturbed run is not bitwise the undisturbed one."),
    ]
    return [sentence for wrong, sentence in checks if wrong]
