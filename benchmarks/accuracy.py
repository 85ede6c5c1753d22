"""Compare predicted with measured times, each configuration left out of the rates that predict it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.gpu_report.calibration import as_work, calibration, configurations, device, predicted
from zaya_jax.hardware.data_sheets import HARDWARE, find_hardware
from zaya_jax.lab.predict.step_time import span
from zaya_jax.run.table import NONE, number

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


def plain(text: str) -> str:
    """Return a recorded text for a page: on one line, and nothing in it is a cell, a tag, a link or code."""
    return re.sub(r"[\\|`\[]", r"\\\g<0>", " ".join(text.split())).replace("<", "&lt;")


def markdown(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table as Markdown."""
    head, *lines = (f"| {' | '.join(cells)} |" for cells in (heads, *rows))
    return "\n".join([head, f"|{'---|' * len(heads)}", *lines])


def table(recordings: Mapping[str, Any]) -> str:
    """Return the Markdown of the recordings of a device, by file: each configuration is predicted from the others."""
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
