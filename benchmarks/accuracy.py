"""Compare predicted with measured times, each configuration left out of the rates that predict it."""

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.benchmark_command import command, flag
from benchmarks.gpu_report.calibration import as_sum, calibration, configurations, device, predicted
from zaya_jax.hardware.data_sheets import Hardware, find_hardware
from zaya_jax.lab.predict.step_time import span
from zaya_jax.lab.result import write_result
from zaya_jax.run.files import expanded
from zaya_jax.run.table import NONE, number

RECORDINGS = Path(__file__).parent / "gpu"
_LARGE = 0.05  # share of a program from which on a part is judged


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Print predicted and measured times of all that GPUs have recorded, as the Markdown of docs/accuracy.md.

    Each configuration is predicted from the measurements of the others on the same device.

    accuracy --calibration calibration.json
    """
    found = configurations(expanded(parsed.folder))
    print(page(expanded(parsed.folder).parent))
    if parsed.calibration:
        write_result(calibration(found), parsed.calibration)
    return {}


def page(folder: Path) -> str:
    """Return the Markdown of all devices in a folder of recordings."""
    lines = []
    for path in sorted(x for x in folder.iterdir() if x.is_dir()):
        if found := configurations(path):
            lines += [f"### {next(iter(found.values()))['hardware']['device']}", "", *_device(found, path)]
    return "\n".join(lines).strip()


def _device(found: Mapping[str, Mapping[str, Any]], folder: Path) -> Iterator[str]:
    sheet = find_hardware(next(iter(found.values()))["hardware"]["device"])
    if sheet is None:
        return
    whole, details = [], []
    for name, row in found.items():
        others = device({other: x for other, x in found.items() if other != name})
        parts = predicted(row, others)
        ends = (sum(predicted(row, end).values()) for end in (sheet, sheet.slowest))
        error, shapes = _error(sum(parts.values()), row["seconds"]), _from_shapes(row, others)
        times = number(row["seconds"], 1e-3), number(sum(parts.values()), 1e-3), error, shapes
        whole.append((name, f"{row['date']}, `{row['recording']}`", *times, span(ends, _milliseconds)))
        details += [(name, *part) for part in _parts(row, parts, sheet)]
    head = (
        "program",
        "recorded",
        "measured (ms)",
        "predicted (ms)",
        "error",
        "from shapes",
        "range if not measured (ms)",
    )
    yield from _table(head, whole)
    head = "program", "part", "share", "measured (ms)", "predicted (ms)", "error", "range if not measured (ms)"
    yield from _table(head, details)
    used = {row["recording"] for row in found.values()}
    others = ", ".join(f"`{path.name}`" for path in sorted(folder.glob("*.json")) if path.name not in used)
    yield f"Recordings that have no program's time of their own: {others or 'none'}."


def _parts(row: Mapping[str, Any], parts: Mapping[str, float], sheet: Hardware) -> Iterator[tuple[str, ...]]:
    """Yield the parts of a program; measured ones with the gaps that follow their launches."""
    measured, count = row.get("parts", {}), sum(work["times"] for work in row["works"])
    gap = max(row["seconds"] - sum(measured.values()), 0.0) / count if len(measured) > 1 else 0.0
    ends = [predicted(row, end) for end in (sheet, sheet.slowest)]
    for part, seconds in sorted(measured.items(), key=lambda item: -item[1]):
        whole = seconds + gap * sum(work["times"] for work in row["works"] if work["part"] == part)
        share, error = whole / row["seconds"], _error(parts.get(part, 0.0), whole)
        times = number(whole, 1e-3), number(parts.get(part, 0.0), 1e-3), error if share >= _LARGE else f"({error})"
        yield part, f"{share:.0%}", *times, span((end.get(part, 0.0) for end in ends), _milliseconds)


def _from_shapes(row: Mapping[str, Any], others: Hardware) -> str:
    """Return the error of the dry run's estimate, if the others have rates for all of its work."""
    works = [as_sum(work) for work in row.get("estimated", ())]
    known = bool(works) and {work.name for work in works} <= {rate.work for rate in others.rates}
    return _error(sum(work.seconds(others) for work in works), row["seconds"]) if known else NONE


def _error(value: float, measured: float) -> str:
    return f"{100 * (value / measured - 1):+.1f} %"


def _milliseconds(seconds: float) -> str:
    return number(seconds, 1e-3)


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterator[str]:
    yield from (f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))
    yield ""


FLAGS = {
    "--folder": flag("benchmarks/gpu/nvidia_h200", "FOLDER", "recordings of a device"),
    "--calibration": {"metavar": "FILE", "help": "write the rates of the device, for --hardware FILE"},
}
main = command(run, FLAGS, output=False)
