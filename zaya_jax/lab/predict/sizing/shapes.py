"""Search model shapes: other widths with about as many parameters, for fast training and fast decoding; and report."""

import dataclasses
import math
import shlex
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any, NamedTuple

from zaya_jax.config import Config, ModelConfig, ParallelConfig
from zaya_jax.config.parallel import AXES
from zaya_jax.errors import InputError
from zaya_jax.hardware.data_sheets import Hardware
from zaya_jax.lab.predict.dry_run.estimate import DecodeEstimate, PhaseEstimate, estimate_decode
from zaya_jax.lab.predict.dry_run.search import candidates, fastest, find_layouts, overrides, single_phase
from zaya_jax.lab.predict.sizing.rules import Measured, check_sizing
from zaya_jax.lab.result import table_lines
from zaya_jax.model.arithmetic import active_parameters, total_parameters
from zaya_jax.run.progress import track
from zaya_jax.run.table import Cell, make_table, quantity

# Factors of the configuration's own sizes.
WIDTHS = tuple(Fraction(x, 8) for x in (6, 7, 8, 9, 10, 12))  # hidden_size
HEADS = tuple(Fraction(x, 2) for x in (1, 2, 4))  # width of the queries relative to hidden_size: half to twice it
EXPERTS = tuple(Fraction(x, 4) for x in (2, 3, 4, 5, 6, 8, 16))  # num_experts
EXPERT_WIDTHS = Fraction(1, 2), Fraction(2)  # limits of expert_size relative to hidden_size
_SIZES = "hidden_size", "expert_size", "num_query_heads", "num_experts", "num_layers"  # that are shown


class Point(NamedTuple):
    """A shape with the settings of a phase."""

    config: Config  # the configuration with both
    overrides: tuple[str, ...]  # the change, as arguments of the command; () for none
    training: PhaseEstimate  # estimate of the phase
    decode: DecodeEstimate  # estimate of a decode step with one sequence, as long as the phase's

    @property
    def values(self) -> tuple[float, float]:
        """Predicted seconds of a training step and of a decode step: less is better."""
        return sum(self.training.seconds.values()), self.decode.step_seconds


def search(
    config: Config, phase: int, devices: int, hardware: Hardware, shapes: Sequence[ModelConfig]
) -> tuple[list[Point], Point | None]:
    """Return the Pareto front of training throughput and decode latency, and the configuration's own point.

    The candidates are the `shapes` with the layouts of `whole_node_layouts`, every policy, and micro-batches in powers
    of two, if training the phase and decoding are estimated to fit. The front starts with the highest throughput. The
    own point is the fastest of the configuration's shape, on the front or not; None if it does not fit or is not among
    `shapes`.
    """
    context, dtype = config.context_for(config.phases[phase]), config.train.compute_dtype
    decodes = {shape: estimate_decode(shape, context, dtype, hardware) for shape in shapes}
    fitting = [shape for shape in shapes if decodes[shape].memory <= hardware.allocatable]
    points, own, least = list[Point](), None, math.inf
    # In this order, only a shape that trains at least as fast as all before it can be on the front.
    fastest_first = sorted(fitting, key=lambda shape: decodes[shape].step_seconds)
    for shape in track("trying", fastest_first, lambda x: f"hidden_size {x.hidden_size}, {x.num_layers} layers"):
        changed, is_own = dataclasses.replace(config, model=shape), shape == config.model
        layouts, limit = whole_node_layouts(changed, phase, devices, hardware.node_size), math.inf if is_own else least
        found = candidates(changed, phase, devices, hardware, layouts, limit)
        for settings, estimate in fastest(found, hardware, limit=limit):
            points.append(Point(settings, overrides(config, phase, settings), estimate, decodes[shape]))
            own = points[-1] if is_own else own  # the last one is the fastest
            least = min(least, points[-1].values[0])
    return [points[index] for index in pareto_front([point.values for point in points])], own


def whole_node_layouts(config: Config, phase: int, devices: int, node: int) -> list[ParallelConfig]:
    """Return layouts whose axes have one device, or as many of a node as they can (`rules.whole_nodes`)."""
    layouts = list(find_layouts(config, phase, devices, node, across_nodes=False))
    most = {axis: max(getattr(layout, axis) for layout in layouts) for axis in AXES if axis != "data"}
    return [layout for layout in layouts if all(getattr(layout, axis) in (1, size) for axis, size in most.items())]


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of points that no other dominates, by ascending first value; of equal points all or none."""
    front, least = list[int](), float("inf")
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        second = points[index][1]
        if second < least or (front and points[index] == points[front[-1]]):
            front.append(index)
            least = second
    return front


def dominates(point: tuple[float, float], other: tuple[float, float]) -> bool:
    """Return whether `point` is no worse than `other` in both values, and better in one."""
    return point != other and point[0] <= other[0] and point[1] <= other[1]


def candidate_shapes(model: ModelConfig, band: float, layers: tuple[int, int]) -> list[ModelConfig]:
    """Return the shapes to compare, the configuration's own first.

    `hidden_size`, `num_query_heads` and `num_experts` take the factors above, `expert_size` every multiple of the step
    within its limits, and `num_layers` the number that brings the total parameters closest to the configuration's.
    Widths are rounded to multiples of 256, or of 64 for a `hidden_size` below 1,024; query heads to multiples of the
    key and value heads. All other keys stay. `band` is the largest relative difference of the total, and of the active
    parameters, from the configuration's; `layers` are the smallest and largest number of layers.
    """
    total, active = total_parameters(model), active_parameters(model)
    shapes = {model: None}
    for shape, outside, of_layer in _without_depth(model):
        whole_layer, period = of_layer + shape.num_experts * _expert(shape), len(shape.layer_pattern)
        depth = max(1, round((total - outside) / whole_layer / period)) * period
        shape_total = outside + depth * whole_layer
        idle = depth * (shape.num_experts - 1) * _expert(shape)
        shape_active = shape_total - idle - shape.vocab_size * shape.hidden_size
        near = abs(shape_total - total) <= band * total and abs(shape_active - active) <= band * active
        if near and layers[0] <= depth <= layers[1]:
            shapes[dataclasses.replace(shape, num_layers=depth)] = None
    return list(shapes)


def _expert(shape: ModelConfig) -> int:
    """Count the parameters of an expert of one layer."""
    return 3 * shape.hidden_size * shape.expert_size


def _without_depth(model: ModelConfig) -> Iterator[tuple[ModelConfig, int, int]]:
    """Yield the shapes of every width, each with its parameters outside the layers, and in a layer outside experts."""
    step = 256 if model.hidden_size >= 1024 else 64
    period = len(model.layer_pattern)
    for width in sorted({_multiple(model.hidden_size * factor, step) for factor in WIDTHS}):
        scale = Fraction(width, model.hidden_size)
        shallow = dataclasses.replace(model, hidden_size=width, num_layers=period)
        outside = 2 * total_parameters(shallow) - total_parameters(dataclasses.replace(shallow, num_layers=2 * period))
        for heads in sorted({_multiple(model.num_query_heads * scale * x, model.num_kv_heads) for x in HEADS}):
            for experts in sorted({max(1, round(model.num_experts * factor)) for factor in EXPERTS}):
                shape = dataclasses.replace(shallow, num_query_heads=heads, num_experts=experts)
                try:
                    shape.check()
                except InputError:
                    continue
                of_layer = (total_parameters(shape) - outside) // period - experts * _expert(shape)
                low, high = (model.expert_size * scale * factor for factor in EXPERT_WIDTHS)
                for expert_width in range(step, int(high) + 1, step):
                    if expert_width >= low:
                        yield dataclasses.replace(shape, expert_size=expert_width), outside, of_layer


def _multiple(value: Fraction, step: int) -> int:
    """Return the multiple of `step` that is closest to `value`, and at least one step."""
    return max(1, round(value / step)) * step


def suggest_shapes(
    config: Config, devices: int, sheet: Hardware, measured: Measured, phase: int, band: float, layers: tuple[int, int]
) -> dict[str, Any]:
    """Search the shapes of `candidate_shapes` for a phase, and describe the front, for JSON; InputError if none fits.

    The points of the `front` come from the highest training throughput on, each with the `overrides` that make it, its
    estimates, and the sizing `rules` that it breaks. `configuration` is the same with its own widths, None if it does
    not fit, and `dominated_by` the number, from 1, of the best point that dominates it, None if it is on the front.
    """
    shapes = candidate_shapes(config.model, band, layers)
    front, own = search(config, phase, devices, sheet, shapes)
    name = config.phases[phase].name
    if not front:
        change = "use more devices, or a smaller batch"
        raise InputError(
            f"--devices is {devices}, but phase {name} is estimated not to fit with any of the shapes: {change}."
        )

    def describe(point: Point) -> dict[str, Any]:
        known = measured if point.config.model == config.model else Measured(knee=measured.knee)  # of other products
        findings = check_sizing(single_phase(point.config, phase), devices, sheet, known)[name]
        model, training, decode = point.config.model, point.training, point.decode
        row = {"overrides": point.overrides, "model": {size: getattr(model, size) for size in _SIZES}}
        row |= {"total_parameters": total_parameters(model), "active_parameters": active_parameters(model)}
        row["tokens_per_second"] = training.tokens / point.values[0]
        row["training"] = {"seconds": training.seconds, "bytes": training.memory.total}
        row["seconds_per_token"] = decode.step_seconds
        row["decode"] = {"seconds": decode.seconds, "bytes": decode.memory}
        broken = (finding for finding in findings if finding.status in ("WARN", "FAIL"))
        return row | {"rules": [f"{finding.status} {finding.rule}" for finding in broken]}

    # Of those that dominate the configuration, the one that gains most: in the product of both times.
    better = [] if own is None else [point for point in front if dominates(point.values, own.values)]
    best = min(better, key=lambda point: point.values[0] * point.values[1], default=None)
    result: dict[str, Any] = {"phase": name, "context": config.context_for(config.phases[phase])}
    result |= {"parameter_band": band, "layers": layers, "shapes": len(shapes)}
    result |= {"front": [describe(point) for point in front], "configuration": None if own is None else describe(own)}
    return result | {"dominated_by": None if best is None else front.index(best) + 1}


def lines(result: dict[str, Any], devices: int, hardware: str) -> list[str]:
    """Return the lines of the report on a result of `suggest_shapes`, for devices of a hardware's name."""
    front, own, (low, high) = result["front"], result["configuration"], result["layers"]
    rows = {f"point {number}": row for number, row in enumerate(front, 1)}
    if result["dominated_by"] is not None:
        rows["own"] = own
    columns: dict[str, str | Cell] = {"": "name", "tokens/s": quantity("tokens_per_second", unit=1.0)}
    columns |= {"ms/token": quantity("seconds_per_token", unit=1e-3), "GB": quantity("training", "bytes", unit=1e9)}
    columns |= {f"{what} B": quantity(f"{what}_parameters", unit=1e9) for what in ("total", "active")}
    columns |= {size: lambda row, size=size: str(row["model"][size]) for size in _SIZES}
    table = make_table("", [{"name": name, **row} for name, row in rows.items()], columns)
    report = [
        f"Widths for phase {result['phase']} on {devices:,} × {hardware}, and for decoding one sequence after "
        f"{result['context']:,} tokens on one",
        f"{result['shapes']} shapes, with total and active parameters within {100 * result['parameter_band']:.3g} % of "
        f"the configuration's, and {low} to {high} layers",
        "Times are the fast ends, with the same fractions of the peaks for all widths; see the sizing rules.",
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
