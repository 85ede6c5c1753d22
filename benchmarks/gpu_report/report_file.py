"""The one file of a report: how it is written, and what can be used of one that was made elsewhere."""

import datetime
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.gpu_report.calibration import calibration, configurations
from benchmarks.measured_pages import BLOCKS
from zaya_jax.errors import InputError, printable
from zaya_jax.lab.predict.step_time import span
from zaya_jax.lab.result import table_lines, write_result
from zaya_jax.ops.kernel_table import parse_table, sources_digest
from zaya_jax.ops.registry import OPERATIONS
from zaya_jax.run.files import read_object
from zaya_jax.run.table import NONE, Table, number

REPORT = "GPU report"  # the `benchmark` of a report and of its parts
SCHEMA = 2  # 1 was a file for each part, without a number
_NAME = re.compile(r"[\w .()/-]+")  # of a device, which becomes part of pages and paths
ORIGIN = ("date", "commit", "command", "versions", "hardware")  # keys of each part


class Report(NamedTuple):
    """What can be used of a report."""

    device: str  # as the runtime calls it
    kernels: Mapping[str, str]  # digest of the sources of each operation
    parts: dict[str, Any]  # recordings by part
    problems: list[str]  # sentences on the parts that cannot be used


def kernel_digests() -> dict[str, str]:
    """Return the digest of the sources of each operation here."""
    return {name: sources_digest(*operation.modules) for name, operation in OPERATIONS.items()}


def write_report(path: Path, device: str, parts: Mapping[str, Any], **rates: Any) -> None:
    """Write the parts that a device has recorded, and the `calibration` that follows from them, if there is one."""
    content = {"benchmark": REPORT, "schema": SCHEMA, "device": device, "kernels": kernel_digests(), "parts": parts}
    write_result(content | rates, str(path))


def read_report(path: Path) -> Report:
    """Read a report, without the parts that are damaged or of another device; InputError if it is no report."""
    content = read_object(path)
    if content.get("benchmark") != REPORT:
        raise InputError(f"{path} is not what make gpu-report wrote, and nothing of it is used.")
    if (schema := content.get("schema", 1)) != SCHEMA:
        reason = f"it has schema {schema!r:.20}, but this version reads {SCHEMA}"
        raise InputError(f"Nothing of {path} is used: {reason}. Measure again, or use the version that wrote it.")
    device, kernels, parts = str(content.get("device") or ""), content.get("kernels"), content.get("parts")
    if not (isinstance(kernels, dict) and isinstance(parts, dict) and _NAME.fullmatch(device)):
        raise InputError(f"Nothing of {path} is used: it is damaged, without a device, kernels or parts.")
    problems = {name: problem for name, part in parts.items() if (problem := _problem(name, part, device))}
    used = {name: part for name, part in parts.items() if name not in problems}
    sentences = [printable(f"{name} is not used: {problem}") for name, problem in problems.items()]
    return Report(device, kernels, used, sentences)


def figures_table(parts: Mapping[str, Mapping[str, Any]], before: Mapping[str, Any]) -> Table:
    """Make the table of all figures, beside what was predicted, and what was adopted `before`, by file."""
    rows, places = [], list[bool]()
    for name, part in parts.items():
        known = before.get(f"{name}.json", {}).get("figures", {})
        for figure, (value, unit, *predicted) in part.get("figures", {}).items():
            last, ends, place = known.get(figure, [None])[0], [end for end in predicted if end is not None], NONE
            if value is not None and ends:
                nearest = min(max(value, min(ends)), max(ends))
                places.append(value == nearest)
                place = "inside" if value == nearest else f"{value / nearest:.2f} × its end"
            ratio = value / last if value is not None and last else None
            cells = [number(value), span(ends, number) or NONE, place, number(last), number(ratio)]
            rows.append([name, figure, unit, *cells])
    heads = ["part", "figure", "unit", "measured", "predicted", "of the range", "adopted before", "measured/before"]
    remark = f"{sum(places)} of {len(places)} figures with a prediction are inside its range."
    return Table("Figures", heads, rows, (remark,))


def _problem(name: str, part: Any, device: str) -> str:
    """Return why a part cannot be used, after trying what is made of it; '' if it can."""
    try:
        if (part["part"], part["benchmark"]) != (name, REPORT) or not re.fullmatch("[a-z_]+", name):
            return "it is not a part of that name."
        if (other := part["hardware"]["device"]) != device:
            return f"it was measured on {other!r:.80}, not on {device}."
        if missing := [key for key in ("size", *ORIGIN) if key not in part]:
            return f"it has no {missing[0]}."
        datetime.datetime.fromisoformat(part["date"])
        table_lines(figures_table({name: part}, {}))
        for block in BLOCKS.values():
            block({device: {name: part}})
        if found := configurations({name: part}):
            calibration(found)
        if "table" in part:
            parse_table(part["table"], device, "its table")
    except (ArithmeticError, AttributeError, InputError, LookupError, TypeError, ValueError) as error:
        return f"it is damaged ({type(error).__name__}: {str(error)[:200]})."
    return ""
