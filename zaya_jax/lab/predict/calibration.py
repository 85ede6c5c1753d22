"""Devices as they were measured: rates that `make gpu-report` recorded, in place of assumptions.

A rate belongs to the sources of the kernels that it was measured with, like `ops.kernel_table`. What has changed since
is predicted as a range.
"""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import HARDWARE, Hardware, Rate, find_hardware, no_data_sheet
from zaya_jax.hardware.measurements import complete, get_hardware
from zaya_jax.ops.kernel_table import sources_digest
from zaya_jax.ops.registry import OPERATIONS
from zaya_jax.run.files import read_object

CALIBRATION = "calibration"  # the result's `benchmark`, and the name of its file
_SHIPPED = Path(__file__).parent / "calibrations"
# The operation of a kernel, by the first word of its name, and of sums of the dry run's estimate ('' for all).
_OPERATIONS = {"attention": "attention", "cca": "cca_mix", "class": "experts", "gram": "gram_polynomial",
               "grouped": "experts", "residual": "residual_norm", "layers": "", "newton": "gram_polynomial",
               "other memory traffic": "residual_norm"}  # fmt: skip


def get_device(name: str, devices: int) -> Hardware:
    """Return what `--hardware` names: a data sheet with the rates measured on it, if any, a file or folder of results.

    InputError if there is no such name or file, or it is damaged.
    """
    if Path(name).is_file():
        return calibrated(read_object(Path(name)), f"--hardware {name}")
    shipped = _SHIPPED / f"{name}.json"
    if name in HARDWARE and shipped.is_file():
        return calibrated(read_object(shipped), str(shipped))
    return get_hardware(name, devices)


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
        rated = f"one {kind} took on {content['date']}"
        return sheet._replace(rates=rates, rated=rated, reached=sheet.reached._replace(**times))


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
