"""Devices as they were measured: rates that `make gpu-report` or `machine kernels --tune` recorded, not assumptions.

A rate belongs to the sources of the kernels that it was measured with, like `ops.kernel_table`. What has changed since
is predicted as a range.
"""

import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE, Hardware, Rate, find_hardware, no_data_sheet
from zaya_jax.hardware.measurements import complete, get_hardware
from zaya_jax.lab.predict.step_time import Work
from zaya_jax.ops.kernel_table import read_choice, read_tables, sources_digest
from zaya_jax.ops.registry import OPERATIONS
from zaya_jax.run.files import read_object

CALIBRATION = "calibration"  # the result's `benchmark`, and the name of its file
_SHIPPED = Path(__file__).parent / "calibrations"
# The operation of a kernel, by its name or the first word of that, and of sums of the dry run's estimate ('' for all).
_OPERATIONS = {"attention": "attention", "cca": "cca_mix", "class": "experts", "router_step": "router_step",
               "gram": "gram_polynomial", "grouped": "experts", "residual": "residual_norm", "layers": "",
               "newton": "gram_polynomial", "other memory traffic": "residual_norm"}  # fmt: skip


def get_device(name: str, devices: int) -> Hardware:
    """Return what `--hardware` names: a data sheet with the rates measured on it, if any, a file or folder of results.

    Tables of measured kernels add their rates. InputError if there is no such name or file, or it is damaged.
    """
    file = _SHIPPED / f"{name}.json" if name in HARDWARE else Path(name)
    if file.is_file():
        return _tuned(calibrated(read_object(file), f"--hardware {name}"))
    hardware = get_hardware(name, devices)
    return hardware if hardware.measured else _tuned(hardware)


def find_device(kind: str) -> Hardware | None:
    """Return the data sheet of the device that a runtime calls `kind` with the rates measured on it; None for none."""
    name = next((name for name, sheet in HARDWARE.items() if sheet is find_hardware(kind)), None)
    return None if name is None else get_device(name, 1)


def calibrated(content: Mapping[str, Any], source: str) -> Hardware:
    """Return the data sheet of the device of a calibration, or of a report that has one, with its rates.

    InputError, whose message starts with `source`, if there is none, or it is damaged.
    """
    content = content.get(CALIBRATION, content)
    if not isinstance(content, dict) or content.get("benchmark") != CALIBRATION:
        raise InputError(f"{source} has no measured rates: give a file that make gpu-report wrote on such a device.")
    with complete(source):
        kind = content["hardware"]["device"]
        sheet = find_hardware(kind)
        if sheet is None:
            raise InputError(f"{source} cannot be used: {no_data_sheet(kind)}")
        times = {name: float(content[name]) for name in ("launch", "gap")}
        rates = tuple(_rate(row) for row in content["rates"])
        rated = f"one {kind} took on {content['date'][:10]}"
        return sheet._replace(rates=rates, rated=rated, reached=sheet.reached._replace(**times))


def _tuned(hardware: Hardware) -> Hardware:
    """Add the rates that tables give of kernels on this kind of device, before others of work of the same size."""
    rates, sources = list[Rate](), list[str]()
    for table in read_tables(lambda text: print(text, file=sys.stderr)):
        if any(kind in str(table.content["device"]) for kind in hardware.kinds):
            with complete(table.source):
                if found := [*_rates_of(table.content["operations"], hardware)]:
                    rates, sources = [*rates, *found], [*sources, table.source]
    return hardware._replace(rates=(*rates, *hardware.rates), tuned=" and ".join(sources))


def _rates_of(operations: Mapping[str, Any], known: Hardware) -> Iterator[Rate]:
    """Yield the rates of the kernels that were chosen, from the times of the programs that launch them."""
    for name, row in operations.items():
        current = name in OPERATIONS and row["sources"] == sources_digest(*OPERATIONS[name].modules)
        for size in row["sizes"]:
            times = size.get("seconds", {}).get(read_choice(size).variant, {})
            for work, seconds in divided(size.get("works", ()), times.get("plain", 0.0), known):
                if work["kernel"]:
                    yield Rate(work["kernel"], work["flops"], work["bytes"], work["fp32"], seconds, current)


def divided(works: Sequence[Mapping[str, Any]], seconds: float, known: Hardware) -> Iterator[tuple[Any, float]]:
    """Divide the time of launches in proportion to what is predicted of each; yield rows and seconds without gaps."""
    expected = [work["times"] * as_work(work).seconds(known) for work in works]
    for work, share in zip(works, expected, strict=True):
        if (own := seconds * share / sum(expected) / work["times"] - known.reached.gap) > 0:
            yield work, own


def as_row(part: str, work: Work) -> dict[str, Any]:
    """Convert the work of a launch in a part of the step to a row of `works`, in tables and recordings."""
    return {"part": part} | {name: getattr(work, name) for name in ("component", "kernel", "flops", "bytes", "fp32")}


def as_work(row: Mapping[str, Any]) -> Work:
    """Convert a recorded row to work: a row of `works` is one kernel launch, a row of `sums` adds no launches."""
    launched = Work(row["component"], row["bytes"], row["flops"], "kernel" if row["kernel"] else "matmul", row["fp32"])
    if row["component"]:
        return launched._replace(kernel=row["kernel"]).within(row["part"])
    rate = "layers" if row["kernel"] == "layers" else "matmul"
    return launched._replace(rate=rate, launches=0, kernel=row["kernel"])


def _rate(row: Mapping[str, Any]) -> Rate:
    current = row["sources"] is None or row["sources"] == kernel_sources(row["work"])
    flops, moved, seconds = (float(row[key]) for key in ("flops", "bytes", "seconds"))
    rate = Rate(str(row["work"]), flops, moved, bool(row["fp32"]), seconds, current)
    if not (rate.seconds > 0 and rate.flops + rate.bytes > 0):
        raise ValueError(f"a rate of {rate.work} without work or time")
    return rate


@functools.cache
def kernel_sources(work: str) -> str | None:
    """Return the digest of the sources of a kernel's operation, by `Work.name`; None for work of XLA's alone."""
    operation = _OPERATIONS.get(work, _OPERATIONS.get(work.partition("_")[0]))
    if operation is None:
        return None
    operations = [OPERATIONS[operation]] if operation else OPERATIONS.values()
    return sources_digest(*dict.fromkeys(module for each in operations for module in each.modules))
