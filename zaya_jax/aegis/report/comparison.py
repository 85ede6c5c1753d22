"""Plots with a line for each run."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from zaya_jax.aegis.report.curves import Line, scaled
from zaya_jax.aegis.report.page_plot import Plot, Scale, color, evaluated, level, make_figure, noisy, plain, trace
from zaya_jax.aegis.report.run_data import RunData
from zaya_jax.run.folder import METRICS, TIMINGS

Get = Callable[[RunData], Line]
_MARKS = 300  # skipped steps and faults that are marked


def loss(runs: Sequence[RunData]) -> Plot:
    """Plot training and held-out loss, with compressors, skipped steps and faults."""
    traces, marks = list[dict[str, Any]](), list[dict[str, Any]]()
    for run in runs:
        index, hue, label = run.index, color(run.index), f", {run.name}" if len(runs) > 1 else ""
        traces += noisy(run.metrics.line("loss"), f"training{label}", hue, index)
        if (held := run.metrics.line("heldout_loss")).steps:
            traces.append(evaluated(held, f"held-out{label}", hue, index))
        faults = [
            fault["step"]
            for node in run.nodes.values()
            for fault in node["faults"]
            if isinstance(fault["step"], int) and fault["step"] >= 0
        ]
        skips = [skip.step for skip in run.metrics.skips]
        for steps, name, symbol in ((skips, "skipped step", "x"), (faults, "fault", "triangle-down")):
            if steps:
                marks.append(_mark(steps[:_MARKS], f"{name}{label}", hue, symbol, index))
    longest = max(runs, key=lambda run: run.metrics.steps[-1])
    traces += [
        level(longest.metrics.line("step"), nats, name, dash, longest.index) for name, nats, dash in _compressors(runs)
    ] + marks
    figure = make_figure(
        traces,
        "loss (nats/token)",
        boundaries=_boundaries(runs),
        yaxis2={"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True},
    )
    return Plot("Training and held-out loss", figure, _phases(runs))


def learning_rate(runs: Sequence[RunData]) -> Plot | str:
    """Plot the learning rate of the matrices."""
    return compare(
        runs, "Learning rate", "learning rate of the matrices", ["learning_rate"], smooth=False, note=_phases(runs)
    )


def batch(runs: Sequence[RunData]) -> Plot | str:
    """Plot the tokens of each step."""
    return compare(
        runs,
        "Batch",
        "tokens per step, with padding",
        [_batch],
        smooth=False,
        step=True,
        integers="xy",
        note=_phases(runs),
    )


def grad_norm(runs: Sequence[RunData]) -> Plot | str:
    """Plot the norm of the gradient."""
    return compare(runs, "Gradient norm", "gradient norm before clipping", ["grad_norm"], scale="log")


def tokens_per_second(runs: Sequence[RunData]) -> Plot | str:
    """Plot the throughput."""
    return compare(
        runs,
        "Throughput",
        "tokens/s",
        ["tokens_per_second"],
        timings=True,
        note="Tokens in the loss over the time of the step, without evaluation, saving and compilation.",
    )


def data_wait(runs: Sequence[RunData]) -> Plot | str:
    """Plot the wait for data."""
    return compare(
        runs,
        "Data wait",
        "wait for the batch (ms per step)",
        [lambda run: scaled(run.timings.line("data_wait"), 1000)],
        timings=True,
        note="The wait happens while the previous step runs; only a wait longer than a step costs time.",
    )


def utilization(runs: Sequence[RunData]) -> Plot | str:
    """Plot the model FLOPs utilization, or the FLOP/s if no device has a known peak."""
    if any(run.timings.line("mfu").steps for run in runs):
        return compare(
            runs, "MFU", "model FLOPs utilization (%)", [lambda run: scaled(run.timings.line("mfu"), 100)], timings=True
        )
    return compare(
        runs,
        "Model FLOP/s",
        "model FLOP/s",
        ["flops_per_second"],
        timings=True,
        note="MFU is not shown: the peak FLOP/s of these devices is not known.",
    )


def entropy(runs: Sequence[RunData]) -> Plot | str:
    """Plot the entropy of the expert load."""
    return compare(
        runs,
        "Entropy of the expert load",
        "entropy over its maximum",
        [("load_entropy", "mean"), ("load_entropy", "lowest")],
        note="1: all experts of a layer get as many tokens. 0: one expert gets them all.",
    )


def largest_load(runs: Sequence[RunData]) -> Plot | str:
    """Plot the load of the busiest expert."""
    return compare(
        runs, "Largest expert load", "largest load / mean load", [("max_load", "mean"), ("max_load", "highest")]
    )


def skip_rate(runs: Sequence[RunData]) -> Plot | str:
    """Plot how many tokens skip the experts."""
    return compare(
        runs, "Tokens that skip the experts", "share of the tokens", [("skip_rate", "mean"), ("skip_rate", "highest")]
    )


def bias_range(runs: Sequence[RunData]) -> Plot | str:
    """Plot the range of the balancing biases."""
    return compare(runs, "Balancing biases", "largest minus smallest bias", [("bias_range", "highest")])


def compare(
    runs: Sequence[RunData],
    title: str,
    y: str,
    metrics: Sequence[str | tuple[str, str] | Get],
    *,
    timings: bool = False,
    smooth: bool = True,
    step: bool = False,
    integers: str = "x",
    scale: Scale = "zero",
    note: str = "",
) -> Plot | str:
    """Plot metrics of all runs that have them.

    Args:
      runs: the runs.
      title: of the plot.
      y: label of the y axis, with its unit.
      metrics: names, with their part if there is one, or functions of the run; the second one is dotted.
      timings: whether they are in `timings.jsonl`.
      smooth: whether to draw a smoothed line over the raw one.
      step: whether values jump instead of changing gradually.
      integers: axes with values that are integers.
      scale: of the y axis.
      note: a sentence below the plot.

    Returns:
      The plot; without a run that has the values, a sentence that says so.
    """
    traces, missing = list[dict[str, Any]](), list[str]()
    for run in runs:
        history, has_values = run.timings if timings else run.metrics, False
        for metric, dash in zip(metrics, ("solid", "dot"), strict=False):
            keys = (metric,) if isinstance(metric, str) else metric
            line = keys(run) if callable(keys) else history.line(*keys)
            if not line.steps:
                continue
            part = f"{metric[1]} of the layers" if isinstance(metric, tuple) else ""
            name = ", ".join(filter(None, (part, run.name if len(runs) > 1 else ""))) or y
            style: dict[str, Any] = {"dash": dash} | ({"shape": "hv"} if step else {})
            options = {"line": style, "showlegend": len(runs) > 1 or len(metrics) > 1}
            drawn = line, name, color(run.index), run.index
            traces += noisy(*drawn, **options) if smooth else [trace(*drawn, **options)]
            has_values = True
        if not has_values:
            missing.append(run.name)
    if not traces:
        return f"{title} is not shown: {TIMINGS if timings else METRICS} does not record it."
    absent = f"These runs do not record it: {', '.join(missing)}." if missing else ""
    figure = make_figure(traces, y, integers=integers, scale=scale, boundaries=_boundaries(runs))
    return Plot(title, figure, " ".join(filter(None, (note, absent))))


def _mark(steps: Sequence[int], name: str, hue: str, symbol: str, run: int) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "markers",
        "x": list(steps),
        "y": [0.97] * len(steps),
        "yaxis": "y2",
        "name": plain(name),
        "meta": {"run": run},
        "marker": {"symbol": symbol, "size": 10, "color": hue},
        "hoverinfo": "x+name",
    }


def _compressors(runs: Sequence[RunData]) -> list[tuple[str, float, str]]:
    """Return label, nats per held-out token and dash of gzip and xz, once for runs in which they agree."""
    levels: dict[tuple[str, float], list[str]] = {}
    for run in runs:
        for name in ("gzip", "xz"):
            bits = run.baselines.get(name)
            nats = None if bits is None else run.nats_per_token(bits)
            if nats is not None:
                levels.setdefault((name, round(nats, 4)), []).append(run.name)
    shared = len(set(map(tuple, levels.values()))) == 1
    return [
        (name if shared else f"{name}, {', '.join(names)}", level, {"gzip": "dot", "xz": "dashdot"}[name])
        for (name, level), names in levels.items()
    ]


def _boundaries(runs: Sequence[RunData]) -> list[tuple[int, int]]:
    return [boundary for run in runs for boundary in run.boundaries]


def _phases(runs: Sequence[RunData]) -> str:
    """Return a sentence about the dotted lines."""
    names = []
    for run in runs:
        if run.boundaries:
            phases = ", ".join(f"{name} from step {step:,}" for step, name in run.metrics.phases)
            names.append(f"{phases} ({run.name})" if len(runs) > 1 else phases)
    return f"Dotted vertical lines separate the phases: {'; '.join(names)}." if names else ""


def _batch(run: RunData) -> Line:
    """Return the tokens of each step: the differences of the tokens seen; those of step 1 are the tokens seen."""
    seen, line = run.metrics.line("tokens_seen"), Line()
    for (step, before), (following, after) in pairwise(zip(seen.steps, seen.values, strict=True)):
        if not line.steps:
            line.add(step, before if step == 1 else (after - before) / (following - step))
        line.add(following, (after - before) / (following - step))
    if len(seen.steps) == 1 and seen.steps[0] == 1:
        line.add(1, seen.values[0])
    return line
