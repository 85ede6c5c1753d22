"""The parts of pages that show what devices have recorded; `python -m benchmarks adopt` writes them between marks."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_report.calibration import as_work, calibration, configurations, device, predicted
from zaya_jax.hardware.data_sheets import HARDWARE, find_hardware
from zaya_jax.lab.predict.step_time import span
from zaya_jax.run.files import read_json
from zaya_jax.run.table import NONE, number, percent

FOLDER = "benchmarks/gpu"
Recordings = Mapping[str, Mapping[str, Any]]  # by the name of a device's folder, and of the file
_MARKED = re.compile(r"(<!-- measured (\w+): begin -->\n).*?(?=<!-- end -->)", re.DOTALL)
_LARGE = 0.05  # share of a program from which on a part is judged
_HEADS = (
    "program",
    "part",
    "share",
    "measured (ms)",
    "predicted (ms)",
    "error",
    "range if not measured (ms)",
    "source",
)


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
    return markdown(["device", "last measured", "recordings", "failed"], rows)


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
                versions = f"{recording['date'][:10]}, jax {plain(recording['versions']['jax'])}"
                speeds = [number(step["tokens_per_second"] / devices), number(step["tflops_per_second"])]
                rest = [percent(step["mfu"]), number(step["peak_bytes"], 1e9), versions, f"`{FOLDER}/{folder}/{file}`"]
                rows.append([plain(name), f"{devices:,} × {device_name(files)}", *speeds, *rest])
    heads = ["what", "card", "tokens/s per GPU", "TFLOP/s", "MFU", "peak memory (GB)", "date, versions", "log"]
    return markdown(heads, rows)


def _accuracy(recordings: Recordings) -> str:
    """Make a section of predicted and measured times for each device with a data sheet."""
    measured = [files for files in recordings.values() if configurations(files)]
    return "\n\n".join(f"## {device_name(files)}\n\n{accuracy_table(files)}" for files in measured)


def plain(text: str) -> str:
    """Return a recorded text for a page: on one line, and nothing in it is a cell, a tag, a link or code."""
    return re.sub(r"[\\|`\[]", r"\\\g<0>", " ".join(text.split())).replace("<", "&lt;")


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    return "\n".join([head, f"|{'---|' * len(heads)}", *lines])


def accuracy_table(recordings: Mapping[str, Any]) -> str:
    """Compare measured times with leave-one-out predictions, for each configuration that a device has recorded."""
    found = configurations(recordings)
    used = {row["recording"] for row in found.values()}
    others = ", ".join(f"`{file}`" for file in recordings if file not in used)
    rows = [(plain(name), *cells) for name in found for cells in _rows(name, found)]
    return f"{markdown(_HEADS, rows)}\n\nRecordings without the time of a program of their own: {others or 'none'}."


def _rows(name: str, found: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield a configuration as a whole, as estimated from shapes, and by part, with the gaps that follow launches."""
    row, others = found[name], {other: x for other, x in found.items() if other != name}
    sheet = find_hardware(row["hardware"]["device"]) or HARDWARE["h200"]
    known = device(calibration(others)) if others else sheet
    parts, seconds, measured = predicted(row, known), row["seconds"], row.get("parts", {})
    ends = [predicted(row, end) for end in (sheet, sheet.slowest)]
    ranges = {part: span((end[part] for end in ends), _milliseconds) for part in parts}
    whole = span((sum(end.values()) for end in ends), _milliseconds)
    origin = f"{row['date'][:10]}, `{row['recording']}`"
    yield "**whole**", NONE, *_compared(seconds, sum(parts.values())), whole, origin
    sums = [as_work(work) for work in row.get("sums", ())]
    if sums and {work.name for work in sums} <= {rate.work for rate in known.rates}:
        estimate, *ends = (sum(work.seconds(end) for work in sums) for end in (known, sheet, sheet.slowest))
        yield "whole, from shapes", NONE, *_compared(seconds, estimate), span(ends, _milliseconds), NONE
    count = sum(work["times"] for work in row["works"])
    gap = max(seconds - sum(measured.values()), 0.0) / count if len(measured) > 1 else 0.0
    for part, busy in sorted(measured.items(), key=lambda item: -item[1]):
        took = busy + gap * sum(work["times"] for work in row["works"] if work["part"] == part)
        *times, error = _compared(took, parts[part])
        share = took / seconds
        yield plain(part), f"{share:.0%}", *times, error if share >= _LARGE else f"({error})", ranges[part], NONE


def _compared(measured: float, value: float) -> tuple[str, str, str]:
    return _milliseconds(measured), _milliseconds(value), f"{100 * (value / measured - 1):+.1f} %"


def _milliseconds(seconds: float) -> str:
    return number(seconds, 1e-3)


BLOCKS = {"devices": _devices, "steps": _steps, "accuracy": _accuracy}
