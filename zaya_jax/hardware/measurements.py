"""Hardware by name: a data sheet, or a folder with results of `python -m zaya_jax.machine` in its place."""

import json
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from zaya_jax.errors import InputError
from zaya_jax.hardware.assumptions import DATA_SHEET
from zaya_jax.hardware.data_sheets import HARDWARE, Hardware, find_hardware

_VERBS = {"matrix products": "gemm", "memory bandwidth": "memory", "collectives": "collectives"}
_KERNELS = ("experts", "attention")  # families of `gemm` that our kernels compute


def get_hardware(name: str, devices: int) -> Hardware:
    """Return the hardware that `--hardware` names.

    Args:
      name: of a data sheet, or a folder with measurements.
      devices: number of devices that will be used.

    Raises:
      InputError: there is no such data sheet or folder, or the folder lacks a measurement.
    """
    if name in HARDWARE:
        return HARDWARE[name]
    if Path(name).is_dir():
        return read_measurements(Path(name), devices)
    raise InputError(f"--hardware is {name!r}, but must be one of {', '.join(HARDWARE)}, or a folder with results of "
                     "python -m zaya_jax.machine gemm, memory and collectives.")  # fmt: skip


def read_measurements(folder: Path, devices: int) -> Hardware:
    """Read the results of `machine gemm`, `memory` and, for several devices, `collectives`.

    Speeds replace those of the device's data sheet, if there is one. The peak is the fastest square's; products reach
    the share of it that those of the measured configuration reach, and kernels that of its experts and attention.

    Raises:
      InputError: a file is missing or damaged.
    """
    results = _results(folder)
    needed = ("gemm", "memory", *(["collectives"] if devices > 1 else []))
    if missing := [verb for verb in needed if verb not in results]:
        raise InputError(f"--hardware {folder} has no result of python -m zaya_jax.machine {missing[0]} --output "
                         f"{folder / missing[0]}.json.")  # fmt: skip
    try:
        return _hardware(results)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise InputError(f"--hardware {folder} has a result without the rows or fields that are needed ({error!r}): "
                         "measure again.") from error  # fmt: skip


def _results(folder: Path) -> dict[str, dict[str, Any]]:
    results: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            result = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"--hardware: {path} cannot be read as JSON: {error}.") from error
        if isinstance(result, dict) and (verb := _VERBS.get(result.get("benchmark", ""))):
            if verb in results:
                raise InputError(f"--hardware: {path} is a second result of machine {verb} in {folder}; keep one.")
            results[verb] = result
    return results


def _hardware(results: Mapping[str, Mapping[str, Any]]) -> Hardware:
    gemm, memory = results["gemm"], results["memory"]
    kind, peak, rows = memory["hardware"]["device"], float(gemm["maximum"]), gemm["results"]
    if gemm["hardware"]["device"] != kind:
        raise ValueError(f"gemm is of {gemm['hardware']['device']}, memory of {kind}")
    triads = (row for row in memory["results"] if row["operation"] == "triad")
    bandwidth = float(max(triads, key=lambda row: row["bytes"])["bytes_per_second"])
    sheet = find_hardware(kind)
    base = sheet or Hardware(
        kinds=(kind,), memory=float(memory["hardware"]["memory_bytes"]), memory_fraction=1.0, peak=peak, fp32_peak=peak,
        bandwidth=bandwidth, node_size=1, intra_node=bandwidth, link=bandwidth, inter_node=bandwidth,
        units=memory["hardware"]["cpus"],
    )  # fmt: skip
    matmul = _share(rows, peak, ("model",))
    kernel = _share(rows, peak, _KERNELS)
    reached = base.reached._replace(matmul=matmul or 1.0, kernel=kernel or matmul or 1.0, memory=1.0)
    peaks = {"peak" if gemm["dtype"] == "bfloat16" else "fp32_peak": peak}
    measured = base._replace(**peaks, bandwidth=bandwidth, measured=True, reached=reached)
    if "collectives" not in results:
        return measured
    gathers = (fit for fit in results["collectives"]["fits"]
               if fit["operation"] == "all_gather" and "beta_bytes_per_second" in fit)  # fmt: skip
    fit = max(gathers, key=lambda fit: fit["devices"])
    sends = fit["beta_bytes_per_second"]["value"] * (fit["devices"] - 1) / fit["devices"]
    if sheet is None:
        return measured._replace(node_size=fit["devices"], intra_node=sends, link=sends, inter_node=sends,
                                 links=DATA_SHEET)  # fmt: skip
    # Between nodes, the data sheet stays.
    return measured._replace(intra_node=sends, link=sends * base.link / base.intra_node,
                             links=DATA_SHEET._replace(adapter=base.links.adapter))  # fmt: skip


def _share(rows: Iterable[Mapping[str, Any]], peak: float, families: Collection[str]) -> float | None:
    """Return the share of the peak that all products of `families` together reach; None if there are none."""
    own = [row for row in rows if row["family"] in families and "warm_flops_per_second" in row]
    seconds = sum(row["flops"] / row["warm_flops_per_second"] for row in own)
    return sum(row["flops"] for row in own) / seconds / peak if seconds else None
