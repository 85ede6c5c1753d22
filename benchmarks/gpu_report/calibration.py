"""Make rates from the recordings of a device, for `lab.predict.calibration`, and predict what they recorded from them.

A recording has `configurations`, by name: `seconds` of a program without a profiler, its `works` (`step_parts.works`),
each with the seconds that all its launches took if they were measured, those of whole `parts`, and `estimated`, the
work of the dry run's estimate.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.hardware.data_sheets import ASSUMPTIONS, Hardware, Rate, find_hardware
from zaya_jax.lab.predict.calibration import CALIBRATION, kernel_sources
from zaya_jax.lab.predict.step_time import Work
from zaya_jax.run.files import read_json

Configuration = Mapping[str, Any]
_WAITING = 20e-6  # seconds of a launch, below which most of them wait rather than work
_TRAFFIC = ("norm", "layers", "other", "accumulation", "embedding")  # parts that no operations of `_SUMS` explain
_SUMS = {"head": ("loss",), "newton_schulz": ("optimizer",), "other memory traffic": _TRAFFIC,
         "layers": ("experts", "attention", "cca_mix", "router", "dispatch")}  # fmt: skip


def configurations(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the configurations in the recordings of a folder, by name, each with the origin of its recording."""
    found = {}
    for path in sorted(folder.glob("*.json")):
        recording = read_json(path)
        if isinstance(recording, dict) and "failed" not in recording:
            origin = {key: recording.get(key) for key in ("date", "hardware", "versions", "sources")}
            for name, row in recording.get("configurations", {}).items():
                unique = f"{name} ({path.stem})" if name in found else name
                found[unique] = {"recording": path.name, **origin, **row}
    return found


def calibration(found: Mapping[str, Configuration]) -> dict[str, Any]:
    """Return a calibration of what `configurations` found, which are of one device."""
    newest = max(found.values(), key=lambda row: row["date"])
    rows = [
        {"work": rate.work, "flops": rate.flops, "bytes": rate.bytes, "fp32": rate.fp32,
         "seconds": float(f"{rate.seconds:.4g}"), "sources": sources} for rate, sources in _rates(found)
    ]  # fmt: skip
    header = {key: newest[key] for key in ("date", "hardware", "versions")}
    return {"benchmark": CALIBRATION, **header, **fixed_times(found), "rates": rows}


def device(found: Mapping[str, Configuration]) -> Hardware:
    """Return the measured device, with rates for the programs that were recorded: none counts as changed."""
    sheet = find_hardware(next(iter(found.values()))["hardware"]["device"])
    if sheet is None:
        raise ValueError("the device has no data sheet")
    rates = tuple(rate for rate, _ in _rates(found))
    return sheet._replace(rates=rates, reached=ASSUMPTIONS._replace(**fixed_times(found)))


def fixed_times(found: Mapping[str, Configuration]) -> dict[str, float]:
    """Return the seconds of a launch that only waits, `launch`, and of the `gap` between two; medians of programs."""
    launch, gap = [], []
    for row in found.values():
        count = _launches(row)
        if row.get("parts"):
            gap.append(max(row["seconds"] - sum(row["parts"].values()), 0.0) / count)
        sheet = find_hardware(row["hardware"]["device"])
        if sheet and row["seconds"] / count < _WAITING:
            busy = sum(work["times"] * as_work(work).roofline(sheet) for work in row["works"])
            launch.append((row["seconds"] - busy) / count)
    defaults = ASSUMPTIONS.launch, ASSUMPTIONS.gap
    return {name: float(f"{statistics.median(values):.3g}") if values else default
            for name, values, default in zip(("launch", "gap"), (launch, gap), defaults, strict=True)}  # fmt: skip


def _launches(row: Configuration) -> int:
    return sum(work["times"] for work in row["works"])


def as_work(row: Mapping[str, Any]) -> Work:
    """Return one launch of a row of works."""
    rate = "kernel" if row["kernel"] else "matmul"
    work = Work(row["component"], row["bytes"], row["flops"], rate, row["fp32"], kernel=row["kernel"])
    return work.within(row["part"])


def as_sum(row: Mapping[str, Any]) -> Work:
    """Return a row of `estimated`."""
    return Work("", row["bytes"], row["flops"], fp32=row["fp32"], launches=0, kernel=row["name"])


def predicted(row: Configuration, hardware: Hardware) -> dict[str, float]:
    """Return the predicted seconds of a configuration by part of the step."""
    parts = dict[str, float]()
    for work in row["works"]:
        parts[work["part"]] = parts.get(work["part"], 0.0) + work["times"] * as_work(work).seconds(hardware)
    return parts


def _rates(found: Mapping[str, Configuration]) -> list[tuple[Rate, str | None]]:
    """Return rates and the digests of their kernels' sources, those that were measured one by one first.

    The time of a whole part, or program, is divided in proportion to what the rates before it predict.
    """
    rates = [(_rate(work, work["seconds"] / work["times"]), _sources(row, work["kernel"]))
             for row in found.values() for work in row["works"] if work["seconds"]]  # fmt: skip
    times = fixed_times(found)
    for row in sorted(found.values(), key=_launches):
        sheet = find_hardware(row["hardware"]["device"])
        if sheet is None:
            continue
        known = sheet._replace(rates=tuple(rate for rate, _ in rates), reached=ASSUMPTIONS._replace(**times))
        for works, seconds in _undivided(row, known):
            expected = [work["times"] * as_work(work).seconds(known) for work in works]
            for work, share in zip(works, expected, strict=True):
                whole = seconds / sum(expected) * share / work["times"] - known.reached.gap
                if whole > 0:
                    rates.append((_rate(work, whole), _sources(row, work["kernel"])))
    for row in found.values():
        rates += _sums(row)
    return rates


def _undivided(row: Configuration, known: Hardware) -> Iterator[tuple[Sequence[Mapping[str, Any]], float]]:
    """Yield works without times of their own, and the seconds that they took together."""
    parts, gap = row.get("parts", {}), known.reached.gap
    left = row["seconds"]
    for part in (*parts, None):
        works = [work for work in row["works"] if (work["part"] == part if part else work["part"] not in parts)]
        # Those of parts are without the gaps between their launches.
        seconds = parts[part] + sum(work["times"] for work in works) * gap if part else left
        left, free = left - seconds, []
        for work in works:
            if work["seconds"]:
                seconds -= work["seconds"] + work["times"] * gap
            elif as_work(work).waits(known):
                seconds -= work["times"] * as_work(work).seconds(known)
            else:
                free.append(work)
        if free and seconds > 0:
            yield free, seconds


def _sums(row: Configuration) -> Iterator[tuple[Rate, str | None]]:
    """Yield the rates of the work of the dry run's estimate; the time in no part is that of the traffic."""
    parts = row.get("parts", {})
    known = {name: sum(parts.get(part, 0.0) for part in _SUMS[name]) for name in _SUMS}
    if len(parts) > 1:
        known["other memory traffic"] += row["seconds"] - sum(parts.values())
        for work in row.get("estimated", ()):
            rate = Rate(work["name"], work["flops"], work["bytes"], work["fp32"], known[work["name"]])
            yield rate, _sources(row, work["name"])


def _rate(work: Mapping[str, Any], seconds: float) -> Rate:
    return Rate(as_work(work).name, work["flops"], work["bytes"], work["fp32"], seconds)


def _sources(row: Configuration, kernel: str) -> str | None:
    return None if kernel_sources(kernel) is None else (row.get("sources") or {}).get(kernel, "")
