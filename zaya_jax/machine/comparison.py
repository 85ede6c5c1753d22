"""Compare what was predicted for a machine with what the smoke test measured on it."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zaya_jax.hardware.assumptions import ASSUMPTIONS
from zaya_jax.hardware.data_sheets import Hardware, find_hardware
from zaya_jax.machine.compilers.predict import Cost

_GB, _MS = 1e9, 1e-3


class Row(NamedTuple):
    """One quantity."""

    part: str  # part of the smoke test that measured it
    quantity: str  # what it is
    unit: str  # of the values
    # of a step, the compiler's memory and the time predicted from the compiled program; of a kernel, the time of its
    # FLOPs or bytes at fractions of the data sheet's peaks (`hardware.assumptions`). None if there is no prediction.
    predicted: float | None
    # of a step, the dry run's estimate from shapes and data sheet; of a kernel, the time of its FLOPs or bytes at the
    # speeds that the part measured in matmuls and copies. None if there is no estimate.
    estimated: float | None
    measured: float | None  # on this machine; of times, the median. None if the device does not report it.
    why: str = ""  # why there is no prediction, a sentence; empty if there is one

    @property
    def ratio(self) -> float | None:
        """The measured value over the predicted one; None without both."""
        return self.measured / self.predicted if self.measured is not None and self.predicted else None


def compare(parts: Mapping[str, Mapping[str, Any]]) -> list[Row]:
    """Return a row for each quantity that the parts measured, by name of the part; parts that failed may have none."""
    kind = parts.get("machine", {}).get("device", "unknown")
    hardware = find_hardware(kind)
    rows = list[Row]()
    for name, part in parts.items():
        if "compiled" in part:
            rows += _step_rows(name, part, hardware)
        elif "rooflines" in part:
            rows += _kernel_rows(name, part, kind, hardware)
    return rows


def no_data_sheet(kind: str) -> str:
    """Return why nothing is predicted for a device that is not in `hardware.data_sheets.HARDWARE`."""
    return f"There is no data sheet of the device ({kind})."


def as_json(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows as JSON values, to four digits."""
    return [
        {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in fields.items()}
        for fields in ({**row._asdict(), "ratio": row.ratio} for row in rows)
    ]


def _step_rows(name: str, part: Mapping[str, Any], hardware: Hardware | None) -> list[Row]:
    compiled, estimated, why = part["compiled"]["memory"]["peak"], part["estimated"], part.get("not_predicted", "")
    seconds = (
        None if part["predicted"] is None else part["predicted"]["seconds"],
        estimated["seconds"],
        statistics.median(part["step_seconds"]),
    )
    measured = part["peak_bytes"] / _GB if part["peak_bytes_by"] == "the device" else None

    def per_second(quantity: str, unit: str, work: float) -> Row:
        predicted, of_dry_run, timed = (None if s is None else work / s for s in seconds)
        return Row(name, quantity, unit, predicted, of_dry_run, timed, why)

    rows = [Row(name, "step", "s", *seconds, why), per_second("speed", "tokens/s", part["tokens"])]
    if hardware is not None:
        rows.append(per_second("MFU", "%", 100 * part["flops"] / part["devices"] / hardware.peak))
    return [*rows, Row(name, "peak memory", "GB", compiled / _GB, estimated["bytes"] / _GB, measured)]


def _kernel_rows(name: str, part: Mapping[str, Any], kind: str, hardware: Hardware | None) -> list[Row]:
    rows, limits = list[Row](), part["rooflines"]
    why = "" if hardware is not None else no_data_sheet(kind)
    for case, row in part["results"].items():
        seconds = row["median_seconds"].get("kernel")
        if seconds is None:
            continue
        cost = Cost(case, row["bytes"], row["flops"], ASSUMPTIONS.kernel)
        predicted = None if hardware is None else cost.seconds(hardware) / _MS
        roofline = max(row["bytes"] / limits["copy"], row["flops"] / limits["dense"]) / _MS
        rows.append(Row(name, case, "ms", predicted, roofline, seconds / _MS, why))
    return rows
