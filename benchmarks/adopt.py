"""Adopt what devices have recorded: recordings, tables of kernels, rates of predictions, and marked parts of pages."""

import argparse
import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.benchmark_command import command
from benchmarks.gpu_report.calibration import calibration, configurations
from benchmarks.gpu_report.report_file import ORIGIN, Report, figures_table, kernel_digests, read_report
from benchmarks.measured_pages import FOLDER, device_name, fill, read_recordings
from zaya_jax.errors import printable
from zaya_jax.hardware.data_sheets import HARDWARE, find_hardware, no_data_sheet
from zaya_jax.lab.predict.calibration import calibrated
from zaya_jax.lab.result import print_tables
from zaya_jax.ops.kernel_table import merged, own_table
from zaya_jax.run.files import expanded, read_object, write_atomically
from zaya_jax.run.versions import package_version
from zaya_jax.run.writing import make_folder

_ROOT = Path(__file__).parents[1]
_PAGES = ("README.md", "docs/*.md")
_TABLES, _CALIBRATIONS = "zaya_jax/ops/tables", "zaya_jax/lab/predict/calibrations"


def run(parsed: argparse.Namespace) -> dict[str, Any]:
    """Adopt the file of a GPU's report: keep its recordings, and its table of kernels with those that ship.

    Then make again what follows from all recordings: the rates of predictions, and the marked parts of README and
    docs/. Without FILE, make only that again. The output compares predicted with measured figures, and says what is
    not used and which files differ.

    adopt benchmarks/gpu/amd_instinct_mi300x.json --dry-run
    """
    _, problems = adopt(_ROOT, expanded(parsed.file) if parsed.file else None, dry_run=parsed.dry_run)
    return {"failed": problems}


def adopt(root: Path, file: Path | None, *, dry_run: bool) -> tuple[list[str], list[str]]:
    """Adopt a report into the clone at `root`; return which files differ, and sentences on parts that are damaged.

    A `dry_run` writes nothing. InputError, before anything is written, if the file is no report, or a recording in the
    clone is damaged.
    """
    recordings, texts, notes = read_recordings(root / FOLDER), dict[str, str](), list[str]()
    report = read_report(file) if file else None
    if report is not None:
        folder = own_table(report.device).stem
        print_tables([figures_table(report.parts, recordings.get(folder, {}))])
        used, notes = _usable(report, recordings.get(folder, {}))
        recordings[folder] = dict(sorted({**recordings.get(folder, {}), **used}.items()))
        texts = {f"{FOLDER}/{folder}/{name}": _json(part) for name, part in used.items()}
        if "table" in (tuned := used.get("tune.json", {})):
            path = f"{_TABLES}/{folder}.json"
            texts[path] = _json(_table(root / path, tuned))
    recordings = {folder: files for folder, files in sorted(recordings.items()) if files}
    for name, sheet in HARDWARE.items():
        devices = {folder: files for folder, files in recordings.items() if find_hardware(device_name(files)) is sheet}
        own = {f"{folder}/{file}": part for folder, files in devices.items() for file, part in files.items()}
        if found := configurations(own):
            texts[f"{_CALIBRATIONS}/{name}.json"] = _json(content := calibration(found))
            current = [rate.current for rate in calibrated(content, name).rates]
            ranges = f"{current.count(False)} of them of kernels that have changed, which are predicted as ranges"
            notes.append(f"{len(current)} measured rates predict for {name}, {ranges}.")
    for path in (path for pattern in _PAGES for path in sorted(root.glob(pattern))):
        texts[str(path.relative_to(root))] = fill(path.read_text(encoding="utf-8"), recordings)
    differ = {path: lines for path, text in texts.items() if (lines := _difference(root / path, text))}
    for path in () if dry_run else differ:
        make_folder((root / path).parent)
        write_atomically(root / path, texts[path])
    if dry_run:
        notes += [line for path, lines in differ.items() if path.endswith(".md") for line in lines]
    what = "differ; nothing is written" if dry_run else "differed, and are written"
    print("\n".join(["", *notes, f"{len(differ)} files {what}:" if differ else "No file differs.", *differ]))
    return [*differ], report.problems if report else []


def _usable(report: Report, before: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the parts to keep, by file, and sentences on the report and on what of it is not used."""
    used, notes, here = {}, list(report.problems), kernel_digests()
    for name, part in report.parts.items():
        recorded = before.get(f"{name}.json", part)
        if recorded["date"] > part["date"]:
            notes.append(f"{name} is not used: it is of {part['date']}, but {recorded['date']} is recorded.")
            continue
        if "failed" in part and "failed" not in recorded:
            notes.append(printable(f"{name} is not used, since it failed: {part['failed']}"))
            continue
        used[f"{name}.json"] = dict(part)
        if "failed" in part:
            notes.append(printable(f"{name} is kept, but nothing follows from it, since it failed: {part['failed']}"))
        if part.get("table") and part["size"] != "full":
            count = len(used[f"{name}.json"].pop("table")["operations"])
            notes.append(f"The table of {name} is not used: {count} operations were emulated at a small size.")
    made = next((part["versions"] for part in used.values()), {})
    versions = " and ".join(f"{x} {made.get(x)} (here {package_version(x)})" for x in ("zaya-jax", "jax"))
    count = f"{len(used)} of {len(report.parts) + len(report.problems)} parts"
    notes.insert(0, f"{count} of {report.device} are kept, made with {versions}.")
    if changed := [name for name, digest in here.items() if report.kernels.get(name) != digest]:
        kept = "their times are kept, but choose no kernels"
        notes.append(f"{len(changed)} of {len(here)} operations have other kernels here: {', '.join(changed)}; {kept}.")
    if find_hardware(report.device) is None:
        notes.append(f"No rates for predictions follow. {no_data_sheet(report.device)}")
    return used, notes


def _table(path: Path, tuned: Mapping[str, Any]) -> dict[str, Any]:
    """Return a part's table of kernels with what ships; what was measured with other kernels replaces nothing."""
    before, here = read_object(path)["operations"] if path.exists() else {}, kernel_digests()
    measured = tuned["table"]["operations"].items()
    rows = {name: row for name, row in measured if row["sources"] == here.get(name) or name not in before}
    return {**tuned["table"], **{key: tuned[key] for key in ORIGIN}, "operations": merged(before, rows)}


def _json(content: Mapping[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _difference(path: Path, text: str) -> list[str]:
    """Return the lines of the difference to a file; [] if there is none."""
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    return [*difflib.unified_diff(before.splitlines(), text.splitlines(), str(path), str(path), "", "", 1, "")]


FLAGS = {
    "file": {"nargs": "?", "metavar": "FILE", "help": "file of make gpu-report (default: none, only what follows)"},
    "--dry-run": {"action": "store_true", "help": "show what would differ, and write nothing"},
}
main = command(run, FLAGS, output=False)
