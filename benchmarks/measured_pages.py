"""The parts of pages that show what devices have recorded; `python -m benchmarks adopt` writes them between marks."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks import accuracy
from benchmarks.gpu_report.calibration import configurations
from zaya_jax.hardware.data_sheets import HARDWARE, find_hardware
from zaya_jax.run.files import read_json
from zaya_jax.run.table import NONE, number, percent

FOLDER = "benchmarks/gpu"
Recordings = Mapping[str, Mapping[str, Any]]  # by the name of a device's folder, and of the file
_MARKED = re.compile(r"(<!-- measured (\w+): begin -->\n).*?(?=<!-- end -->)", re.DOTALL)


def read_recordings(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what the devices have recorded in `FOLDER` of a clone; InputError if a file is damaged."""
    recordings: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*/*.json")):
        recordings.setdefault(path.parent.name, {})[path.name] = read_json(path)
    return recordings


def fill(page: str, recordings: Recordings) -> str:
    """Return the text of a page with its marked parts made again."""
    return _MARKED.sub(lambda mark: f"{mark[1]}\n{BLOCKS[mark[2]](recordings)}\n\n", page)


def device_name(files: Mapping[str, Any]) -> str:
    """Return the name of the device in its newest recording."""
    return _newest(files)["hardware"]["device"]


def _newest(files: Mapping[str, Any]) -> Mapping[str, Any]:
    return max((row for row in files.values() if "hardware" in row), key=lambda row: row["date"])


def _devices(recordings: Recordings) -> str:
    """List the devices with what they have recorded, and the data sheets of which no device has recorded anything."""
    rows, missing = [], dict(HARDWARE)
    for files in recordings.values():
        newest, name = _newest(files), device_name(files)
        missing = {key: sheet for key, sheet in missing.items() if sheet is not find_hardware(name)}
        ends: dict[bool, list[str]] = {False: [], True: []}
        for file, row in files.items():
            ends["failed" in row].append(file.removesuffix(".json"))
        card = f"{max(row.get('devices', 1) for row in files.values()):,} × {name}"
        rows.append([card, newest["date"][:10], *(", ".join(names) or NONE for names in ends.values())])
    rows += [[name.upper(), NONE, NONE, NONE] for name in missing]
    return accuracy.markdown(["device", "last measured", "recordings", "failed"], rows)


def _steps(recordings: Recordings) -> str:
    """Make the table of whole training steps."""
    rows = []
    for folder, files in recordings.items():
        for file, recording in files.items():
            steps = {}
            if "tokens_per_second" in recording and "failed" not in recording:
                steps[f"zaya_jax, {recording['layers']:,} layers, {recording['tokens']:,} tokens a step"] = recording
            elif recording.get("benchmark") == "whole optimizer step":
                steps[f"zaya_jax, {recording['size']}"] = recording["results"]["ours"]
                steps[recording["peer"]] = recording["results"]["peer"]
            for name, step in steps.items():
                devices = recording.get("devices", 1)
                versions = f"{recording['date'][:10]}, jax {accuracy.plain(recording['versions']['jax'])}"
                speeds = [number(step["tokens_per_second"] / devices), number(step["tflops_per_second"])]
                rest = [percent(step["mfu"]), number(step["peak_bytes"], 1e9), versions, f"`{FOLDER}/{folder}/{file}`"]
                rows.append([accuracy.plain(name), f"{devices:,} × {device_name(files)}", *speeds, *rest])
    heads = ["what", "card", "tokens/s per GPU", "TFLOP/s", "MFU", "peak memory (GB)", "date, versions", "log"]
    return accuracy.markdown(heads, rows)


def _accuracy(recordings: Recordings) -> str:
    """Make a section of predicted and measured times for each device with a data sheet."""
    measured = [files for files in recordings.values() if configurations(files)]
    return "\n\n".join(f"## {device_name(files)}\n\n{accuracy.table(files)}" for files in measured)


BLOCKS = {"devices": _devices, "steps": _steps, "accuracy": _accuracy}
