"""The output of `sizing --suggest`: the Pareto front, and the place of the configuration beside it."""

import shlex
from typing import Any

from zaya_jax.config import Config
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.lab.predict.dry_run.search import single_phase
from zaya_jax.lab.predict.sizing.check import check_sizing
from zaya_jax.lab.predict.sizing.rules import Measured
from zaya_jax.lab.predict.sizing.shapes import Point, candidate_shapes, dominates, search
from zaya_jax.lab.result import table_lines
from zaya_jax.model.arithmetic import active_parameters, total_parameters
from zaya_jax.run.table import make_table, quantity

_SIZES = "hidden_size", "expert_size", "num_query_heads", "num_experts", "num_layers"  # that are shown


def suggest_shapes(
    config: Config,
    devices: int,
    hardware: Hardware,
    measured: Measured,
    phase: int,
    band: float,
    layers: tuple[int, int],
) -> dict[str, Any]:
    """Search the shapes of `candidate_shapes` for a phase, and describe the front, for JSON.

    Returns:
      The `phase`, `context`, `parameter_band`, `layers` and number of `shapes`; the points of the `front`, from the
      highest training throughput, each with the `overrides` that make it, its estimates, and the sizing `rules` that it
      breaks; the same of the `configuration` with its own widths, None if it does not fit; and the number, from 1, of
      the point that it is `dominated_by`, None if it is on the front.

    Raises:
      InputError: no candidate fits.
    """
    shapes = candidate_shapes(config.model, band, layers)
    front, own = search(config, phase, devices, hardware, shapes)
    name = config.phases[phase].name
    if not front:
        change = "use more devices, or a smaller batch"
        raise InputError(
            f"--devices is {devices}, but phase {name} is estimated not to fit with any of the shapes: {change}."
        )

    def describe(point: Point) -> dict[str, Any]:
        known = measured if point.config.model == config.model else Measured(knee=measured.knee)  # of other products
        findings = check_sizing(single_phase(point.config, phase), devices, hardware, known)[name]
        model, training, decode = point.config.model, point.training, point.decode
        return {
            "overrides": point.overrides,
            "model": {size: getattr(model, size) for size in _SIZES},
            "total_parameters": total_parameters(model),
            "active_parameters": active_parameters(model),
            "tokens_per_second": point.tokens_per_second,
            "training": {"seconds": training.seconds, "bytes": training.memory.total},
            "seconds_per_token": decode.step_seconds,
            "decode": {"seconds": decode.seconds, "bytes": decode.memory},
            "rules": [f"{finding.status} {finding.rule}" for finding in findings if finding.status in ("WARN", "FAIL")],
        }

    # Of those that dominate the configuration, the one that gains most: in the product of both times.
    better = [] if own is None else [point for point in front if dominates(point.values, own.values)]
    best = min(better, key=lambda point: point.values[0] * point.values[1], default=None)
    return {
        "phase": name,
        "context": config.context_for(config.phases[phase]),
        "parameter_band": band,
        "layers": layers,
        "shapes": len(shapes),
        "front": [describe(point) for point in front],
        "configuration": None if own is None else describe(own),
        "dominated_by": None if best is None else front.index(best) + 1,
    }


def lines(result: dict[str, Any], devices: int, hardware: str) -> list[str]:
    """Return the lines of the report on a result of `suggest_shapes`, for devices of a hardware's name."""
    front, own, (low, high) = result["front"], result["configuration"], result["layers"]
    rows = {f"point {number}": row for number, row in enumerate(front, 1)}
    if result["dominated_by"] is not None:
        rows["own"] = own
    columns = {
        "": "name",
        "tokens/s": quantity("tokens_per_second", unit=1.0),
        "ms/token": quantity("seconds_per_token", unit=1e-3),
        "GB": quantity("training", "bytes", unit=1e9),
        "total B": quantity("total_parameters", unit=1e9),
        "active B": quantity("active_parameters", unit=1e9),
        **{size: lambda row, size=size: str(row["model"][size]) for size in _SIZES},
    }
    table = make_table("", [{"name": name, **row} for name, row in rows.items()], columns)
    report = [
        f"Widths for phase {result['phase']} on {devices:,} × {hardware}, and for decoding one sequence after "
        f"{result['context']:,} tokens on one",
        f"{result['shapes']} shapes, with total and active parameters within {100 * result['parameter_band']:.3g} % of "
        f"the configuration's, and {low} to {high} layers",
        "Times are predictions that assume the same fractions of the peaks for all widths; see the sizing rules.",
        *table_lines(table)[1:],
    ]
    if own is None:
        report.append("The configuration's own widths are estimated not to fit.")
    elif (number := result["dominated_by"]) is None:
        point = next(index for index, row in enumerate(front, 1) if row["model"] == own["model"])
        report.append(f"The configuration's own widths are on the front: point {point}.")
    else:
        best, depth = front[number - 1], own["model"]["num_layers"]
        faster = best["tokens_per_second"] / own["tokens_per_second"] - 1
        less = 1 - best["seconds_per_token"] / own["seconds_per_token"]
        report += [
            f"The configuration's own widths are dominated by point {number}, which trains {faster:.1%} faster and "
            f"decodes a token in {less:.1%} less time.",
            f"  s/step: {_changes(own['training'], best['training'], 1)}",
            f"  ms/token: {_changes(own['decode'], best['decode'], 1e3)}",
        ]
        near = round(0.9 * depth), round(1.1 * depth)
        if low < near[0] and front[-1]["model"]["num_layers"] < near[0]:
            report.append(
                "Fewer layers launch fewer kernels, but the estimates do not show what depth is worth to the loss. To "
                f"compare widths alone, set --layers {near[0]} {near[1]}."
            )
    for name, row in rows.items():
        report.append(f"{name}: {' '.join(map(shlex.quote, row['overrides'])) or 'no change'}")
        report.append(f"  sizing rules broken: {', '.join(row['rules']) or 'none'}")
    return report


def _changes(own: dict[str, Any], best: dict[str, Any], unit: float) -> str:
    pairs = ((name, unit * seconds, unit * best["seconds"][name]) for name, seconds in own["seconds"].items())
    return ", ".join(f"{name} {before:.3g} → {after:.3g}" for name, before, after in pairs)
