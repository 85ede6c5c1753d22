"""Make the rates of a device from its recordings, for `lab.predict.calibration`.

A recording has `configurations`, by name: `seconds` of a program without a profiler; its `works`, launches that are
alike, with the seconds of all where those were measured; `sums`, which the dry run estimates as a whole, likewise; the
seconds of whole `parts`.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zaya_jax.hardware.data_sheets import ASSUMPTIONS, HARDWARE, Hardware, find_hardware
from zaya_jax.lab.predict.calibration import CALIBRATION, as_work, calibrated, divided, kernel_sources

Configuration = Mapping[str, Any]
_WAITING = 20e-6  # seconds of a launch, below which most of them wait rather than work


def configurations(recordings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the configurations of recordings, by file: those of parts that passed, on a device with a data sheet."""
    found = {}
    for file, recording in recordings.items():
        ran = recording.get("configurations", {}) if isinstance(recording, dict) and "failed" not in recording else {}
        for name, row in ran.items():
            if find_hardware(recording["hardware"]["device"]):
                origin = {key: recording.get(key) for key in ("date", "hardware", "versions", "sources")}
                found[f"{name} ({file})" if name in found else name] = {"recording": file, **origin, **row}
    return found


def calibration(found: Mapping[str, Configuration]) -> dict[str, Any]:
    """Return the calibration of a device: rates that were measured launch by launch first.

    The time of a whole part, or program, is divided in proportion to what the rates before it predict. A kernel that
    was measured again after a change has only its new rates.
    """
    newest = max(found.values(), key=lambda row: row["date"])
    rates = list[dict[str, Any]]()
    content = {"benchmark": CALIBRATION, **{key: newest[key] for key in ("date", "hardware", "versions")}}
    content |= {**_fixed_times(found), "rates": rates}

    def sources(row: Configuration, work: Mapping[str, Any]) -> str | None:
        changes = kernel_sources(as_work(work).name) is not None
        return (row["sources"] or {}).get(work["kernel"], "") if changes else None

    last = dict[str, str | None]()
    for row in sorted(found.values(), key=lambda row: row["date"]):
        last |= {as_work(work).name: sources(row, work) for work in (*row["works"], *row.get("sums", ()))}

    def add(row: Configuration, work: Mapping[str, Any], seconds: float) -> None:
        rate = {"work": as_work(work).name, **{key: work[key] for key in ("flops", "bytes", "fp32")}}
        rate |= {"seconds": float(f"{seconds:.4g}"), "sources": sources(row, work)}
        if rate["sources"] == last[rate["work"]]:
            rates.append(rate)

    for row in found.values():
        for work in (*row["works"], *row.get("sums", ())):
            if work["seconds"]:
                add(row, work, work["seconds"] / work["times"])
    for row in sorted(found.values(), key=_launches):
        known = device(content)
        for works, seconds in _undivided(row, known):
            for work, own in divided(works, seconds, known):
                add(row, work, own)
    return content


def device(content: Mapping[str, Any]) -> Hardware:
    """Return the device of a calibration for the programs that were recorded: no kernel counts as changed."""
    hardware = calibrated(content, CALIBRATION)
    return hardware._replace(rates=tuple(rate._replace(current=True) for rate in hardware.rates))


def predicted(row: Configuration, hardware: Hardware) -> dict[str, float]:
    """Return the predicted seconds of a configuration by part of the step."""
    parts = dict[str, float]()
    for work in row["works"]:
        parts[work["part"]] = parts.get(work["part"], 0.0) + work["times"] * as_work(work).seconds(hardware)
    return parts


def _launches(row: Configuration) -> int:
    return sum(work["times"] for work in row["works"])


def _fixed_times(found: Mapping[str, Configuration]) -> dict[str, float]:
    """Return the seconds of a launch that only waits, `launch`, and of the `gap` between two; medians of programs."""
    times: dict[str, list[float]] = {"launch": [], "gap": []}
    sheet = find_hardware(next(iter(found.values()))["hardware"]["device"]) or HARDWARE["h200"]
    for row in found.values():
        if row.get("parts"):
            times["gap"].append(max(row["seconds"] - sum(row["parts"].values()), 0.0) / _launches(row))
        if row["seconds"] / _launches(row) < _WAITING:
            busy = sum(work["times"] * as_work(work).roofline(sheet) for work in row["works"])
            times["launch"].append((row["seconds"] - busy) / _launches(row))
    medians = {name: statistics.median(each or [getattr(ASSUMPTIONS, name)]) for name, each in times.items()}
    return {name: float(f"{median:.3g}") for name, median in medians.items()}


def _undivided(row: Configuration, known: Hardware) -> Iterator[tuple[Sequence[Mapping[str, Any]], float]]:
    """Yield works without times of their own, and the seconds that they took together, with the gaps after them."""
    parts, gap, left = row.get("parts", {}), known.reached.gap, row["seconds"]
    for part in (*parts, None):
        works = [work for work in row["works"] if (work["part"] == part if part else work["part"] not in parts)]
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
