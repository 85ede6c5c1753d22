"""Hardware by name: a data sheet, or a folder with results of `python -m zaya_jax.machine` in its place."""

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zaya_jax.config.checks import require
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import DATA_SHEET, HARDWARE, Hardware, find_hardware
from zaya_jax.hardware.presets import Preset
from zaya_jax.run.files import read_json

_PROGRAM = "python -m zaya_jax.machine"
# Verbs by the benchmark that their results name.
_VERBS = {"matrix products": "gemm", "memory bandwidth": "memory"} | {x: x for x in ("collectives", "preflight")}
_THRESHOLDS = {f"--xla_gpu_{name}_combine_threshold_bytes": name for name in ("all_gather", "reduce_scatter")}
_KERNELS = ("experts", "attention")  # families of `gemm` that our kernels compute


def get_hardware(name: str, devices: int) -> Hardware:
    """Return the data sheet, or the measurements of a folder, that `--hardware` names; InputError for neither."""
    if name in HARDWARE:
        return HARDWARE[name]
    if Path(name).is_dir():
        return read_measurements(Path(name), devices)
    results = f"a file of make gpu-report, or a folder with results of {_PROGRAM} gemm, memory and collectives"
    allowed = f"one of {', '.join(HARDWARE)}, {results}"
    raise InputError(f"--hardware is {name!r}, but must be {allowed}.")


def read_measurements(folder: Path, devices: int) -> Hardware:
    """Read the results of `machine gemm`, `memory` and, for several devices, `collectives`.

    Speeds replace those of the device's data sheet, if there is one. The peak is the fastest square's; products reach
    the share of it that those of the measured configuration reach, and kernels that of its experts and attention.
    InputError if a file is missing or damaged.
    """
    results = read_results(folder, "--hardware")
    for verb in ("gemm", "memory", *(["collectives"] if devices > 1 else [])):
        if verb not in results:
            command = f"{_PROGRAM} {verb} --output {folder / verb}.json"
            raise InputError(f"--hardware {folder} has no result of {command}.")
    with complete(f"--hardware {folder} has a result"):
        return _hardware(results)


def measured_preset(preset: Preset, folder: str) -> Preset:
    """Replace the sizes up to which a preset combines messages by those that saturate the measured network.

    InputError if `folder`, the key `measurements`, has no fits of both operations, or fits of another accelerator.
    """
    if not any(setting.name in _THRESHOLDS for setting in preset.settings):
        return preset
    with complete(f"measurements={folder} has a result of collectives"):
        return _with_thresholds(preset, folder)


@contextlib.contextmanager
def complete(subject: str) -> Iterator[None]:
    """Raise `InputError` if the block misses rows or fields of a result; `subject` starts its message."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError(f"{subject} without the rows or fields that are needed ({error!r}): measure again.") from error


def largest_fit(result: Mapping[str, Any], operation: str, key: str) -> dict[str, Any] | None:
    """Return the fit of an operation that has `key`, over the most devices; None if there is none."""
    fits = [fit for fit in result.get("fits", ()) if fit["operation"] == operation and key in fit]
    return max(fits, key=lambda fit: fit["devices"], default=None)


def _with_thresholds(preset: Preset, folder: str) -> Preset:
    source, values = f"measurements={folder} has", dict[str, str]()
    result = read_results(Path(folder), "measurements").get("collectives")
    kind = "" if result is None else str(result.get("hardware", {}).get("device"))
    if result is not None and not any(name in kind for name in HARDWARE[preset.name].kinds):
        change = "measure this machine, or leave measurements out"
        raise InputError(f"{source} collectives of {kind}, but the preset is {preset.name}: {change}.")
    for flag, operation in _THRESHOLDS.items():
        fit = largest_fit(result or {}, operation, "knee_bytes")
        if fit is None:
            verb = f"collectives --operations {' '.join(_THRESHOLDS.values())}"
            run = f"{_PROGRAM} {verb} --output {Path(folder, 'collectives.json')}"
            raise InputError(f"{source} no fit of {operation}. Run {run}.")
        knee, rows = fit["knee_bytes"], (result or {})["results"]
        largest = max(row["bytes"] for row in rows if row["operation"] == operation)
        if not 0 < knee <= largest:
            raise InputError(
                f"{source} a fit of {operation} that saturates at {knee:,.0f} bytes, but sizes up to {largest:,} were "
                "measured. Measure again with a larger --max-bytes and more --repeats."
            )
        # XLA counts a collective's output, which for a reduce-scatter is one device's share.
        share = fit["devices"] if operation == "reduce_scatter" else 1
        values[flag] = str(max(1, round(knee / share)))
    settings = (setting._replace(value=values.get(setting.name, setting.value)) for setting in preset.settings)
    return preset._replace(settings=tuple(settings))


def recorded_result(verb: str, file: str | None, folder: str | None) -> dict[str, Any] | None:
    """Return the result of `verb` in `file`, of `--baseline`, else in `folder`; InputError if it is of another verb."""
    if file is None:
        return None if folder is None else read_results(Path(folder), "measurements").get(verb)
    result = read_json(Path(file))
    if not isinstance(result, dict) or _VERBS.get(result.get("benchmark", "")) != verb:
        raise InputError(f"--baseline {file} is no result of {_PROGRAM} {verb} --output.")
    return result


def read_results(folder: Path, source: str) -> dict[str, dict[str, Any]]:
    """Return the results of gemm, memory, collectives and preflight in a folder, by verb; other files are left out.

    InputError, which names the flag or key `source`, if it is no folder, or has a damaged file or two of a verb.
    """
    require(folder.is_dir(), source, str(folder), f"a folder with results of {_PROGRAM}")
    results: dict[str, dict[str, Any]] = {}
    for path in sorted(folder.glob("*.json")):
        result = read_json(path)
        if isinstance(result, dict) and (verb := _VERBS.get(result.get("benchmark", ""))):
            if verb in results:
                raise InputError(f"{source}: {path} is a second result of machine {verb} in {folder}; keep one.")
            results[verb] = result
    return results


def _hardware(results: Mapping[str, Mapping[str, Any]]) -> Hardware:
    gemm, memory = results["gemm"], results["memory"]
    device, peak, rows = memory["hardware"], float(gemm["maximum"]), gemm["results"]
    if gemm["hardware"]["device"] != device["device"]:
        raise ValueError(f"gemm is of {gemm['hardware']['device']}, memory of {device['device']}")
    triads = (row for row in memory["results"] if row["operation"] == "triad")
    speed = float(max(triads, key=lambda row: row["bytes"])["bytes_per_second"])
    sheet = find_hardware(device["device"])
    if (base := sheet) is None:
        kinds, cpus = (device["device"],), device["cpus"]
        base = Hardware(kinds, float(device["memory_bytes"]), 1.0, peak, peak, speed, 1, speed, speed, speed, cpus)
    matmul, kernel = _share(rows, peak, ("model",)), _share(rows, peak, _KERNELS)
    kernel = kernel or matmul or 1.0
    reached = base.reached._replace(matmul=matmul or 1.0, kernel=kernel, layers=kernel, memory=1.0, moving=1.0)
    peaks = {"peak" if gemm["dtype"] == "bfloat16" else "fp32_peak": peak}
    measured = base._replace(**peaks, bandwidth=speed, measured=True, reached=reached)
    if "collectives" not in results:
        return measured
    if (fit := largest_fit(results["collectives"], "all_gather", "beta_bytes_per_second")) is None:
        raise KeyError("all_gather")
    sends = fit["beta_bytes_per_second"]["value"] * (fit["devices"] - 1) / fit["devices"]
    links = DATA_SHEET._replace(adapter=base.links.adapter)  # between nodes, the data sheet stays
    measured = measured._replace(intra_node=sends, link=sends * base.link / base.intra_node, links=links)
    return measured if sheet else measured._replace(node_size=fit["devices"], inter_node=sends, links=DATA_SHEET)


def _share(rows: Iterable[Mapping[str, Any]], peak: float, families: Collection[str]) -> float | None:
    """Return the share of the peak that all products of `families` together reach; None if there are none."""
    own = [row for row in rows if row["family"] in families and "warm_flops_per_second" in row]
    seconds = sum(row["flops"] / row["warm_flops_per_second"] for row in own)
    return sum(row["flops"] for row in own) / seconds / peak if seconds else None
