"""Compare predicted with measured times, each configuration left out of the rates that predict it."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.benchmark_command import command, flag
from benchmarks.gpu_report.calibration import as_work, calibration, configurations, device, predicted
from zaya_jax.hardware.data_sheets import find_hardware
from zaya_jax.lab.predict.step_time import span
from zaya_jax.lab.result import write_result
from zaya_jax.run.files import expanded, read_json
from zaya_jax.run.table import NONE, number

_LARGE = 0.05  # share of a program from which on a part is judged
_HEAD = """| program | part | share | measured (ms) | predicted (ms) | error | range if not measured (ms) | source |
|---|---|---|---|---|---|---|---|"""


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Print predicted and measured times of what a GPU has recorded, as the Markdown of docs/accuracy.md.

    Each configuration is predicted from the measurements of the others.

    accuracy --calibration calibration.json
    """
    print(table(expanded(parsed.folder)))
    if parsed.calibration:
        write_result(calibration(read_configurations(expanded(parsed.folder))), parsed.calibration)
    return {}


def read_configurations(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the configurations in the recordings of a folder; InputError if one is damaged."""
    return configurations({path.name: read_json(path) for path in sorted(folder.glob("*.json"))})


def table(folder: Path) -> str:
    """Return the Markdown of a folder of recordings."""
    found = read_configurations(folder)
    used = {row["recording"] for row in found.values()}
    others = ", ".join(f"`{path.name}`" for path in sorted(folder.glob("*.json")) if path.name not in used)
    rows = [(name, *cells) for name in found for cells in _rows(name, found)]
    lines = (f"| {' | '.join(cells)} |" for cells in rows)
    return "\n".join([_HEAD, *lines, "", f"Recordings without the time of a program of their own: {others or 'none'}."])


def _rows(name: str, found: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Yield a configuration as a whole, as estimated from shapes, and by part, with the gaps that follow launches."""
    row, known = found[name], device(calibration({other: x for other, x in found.items() if other != name}))
    sheet = find_hardware(row["hardware"]["device"]) or known
    parts, seconds, measured = predicted(row, known), row["seconds"], row.get("parts", {})
    ends = [predicted(row, end) for end in (sheet, sheet.slowest)]
    ranges = {part: span((end[part] for end in ends), _milliseconds) for part in parts}
    whole = span((sum(end.values()) for end in ends), _milliseconds)
    yield "**whole**", NONE, *_compared(seconds, sum(parts.values())), whole, f"{row['date']}, `{row['recording']}`"
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
        yield part, f"{share:.0%}", *times, error if share >= _LARGE else f"({error})", ranges[part], NONE


def _compared(measured: float, value: float) -> tuple[str, str, str]:
    return _milliseconds(measured), _milliseconds(value), f"{100 * (value / measured - 1):+.1f} %"


def _milliseconds(seconds: float) -> str:
    return number(seconds, 1e-3)


FLAGS = {
    "--folder": flag("benchmarks/gpu/nvidia_h200", "FOLDER", "recordings of a device"),
    "--calibration": {"metavar": "FILE", "help": "write the rates of the device, for --hardware FILE"},
}
main = command(run, FLAGS, output=False)
