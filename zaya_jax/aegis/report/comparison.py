"""Plots with a line for each run."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from zaya_jax.aegis.report.curves import Line, scaled
from zaya_jax.aegis.report.page_plot import (
    DASHES,
    Plot,
    Scale,
    color,
    evaluated,
    level,
    make_figure,
    noisy,
    scatter,
    trace,
)
from zaya_jax.aegis.report.run_data import RunData
from zaya_jax.run.folder import METRICS, TIMINGS

_MARKS = 300  # skipped steps and faults that are marked


def loss(runs: Sequence[RunData]) -> Plot:
    """Plot training and held-out loss, with compressors, skipped steps and faults."""
    traces, marks = list[dict[str, Any]](), list[dict[str, Any]]()
    for run in runs:
        index, hue, label = run.index, color(run.index), f", {run.name}" if len(runs) > 1 else ""
        traces += noisy(run.metrics.line("loss"), f"training{label}", hue, index)
        if (held := run.metrics.line("heldout_loss")).steps:
            traces.append(evaluated(held, f"held-out{label}", hue, index))
        faults = [fault["step"] for node in run.nodes.values() for fault in node["faults"]]
        faults = [step for step in faults if isinstance(step, int) and step >= 0]
        skips = [skip.step for skip in run.metrics.skips]
        for steps, name, symbol in ((skips, "skipped step", "x"), (faults, "fault", "triangle-down")):
            if steps := steps[:_MARKS]:
                marker, top = {"symbol": symbol, "size": 10, "color": hue}, [0.97] * len(steps)
                look = {"mode": "markers", "yaxis": "y2", "marker": marker, "hoverinfo": "x+name"}
                marks.append(scatter(steps, top, f"{name}{label}", index, **look))
    longest = max(runs, key=lambda run: run.metrics.steps[-1])
    line = longest.metrics.line("step")
    traces += [level(line, nats, name, dash, longest.index) for name, nats, dash in _compressors(runs)] + marks
    hidden = {"overlaying": "y", "range": [0, 1], "visible": False, "fixedrange": True}
    figure = make_figure(traces, "loss (nats/token)", boundaries=_boundaries(runs), yaxis2=hidden)
    return Plot("Training and held-out loss", figure, _phases(runs))


class Comparison(NamedTuple):
    """What a plot of all runs shows."""

    title: str
    y: str  # label of the y axis, with its unit
    # Names, with their part if there is one, or functions of the run; the second one is dotted.
    metrics: Sequence[str | tuple[str, str] | Callable[[RunData], Line]]
    timings: bool = False  # whether they are in `timings.jsonl`
    note: str = ""  # a sentence below the plot
    scale: Scale = "zero"  # of the y axis
    is_setting: bool = False  # whether the values are settings, without noise; then the phases are explained
    integers: str = "x"  # axes with values that are integers; on the y axis they jump

    def plot(self, runs: Sequence[RunData]) -> Plot | str:
        """Plot the metrics of all runs that have them; without such a run, return a sentence that says so."""
        traces, missing = list[dict[str, Any]](), list[str]()
        several = len(runs) > 1
        for run in runs:
            history, before = run.timings if self.timings else run.metrics, len(traces)
            for metric, dash in zip(self.metrics, ("solid", "dot"), strict=False):
                keys = (metric,) if isinstance(metric, str) else metric
                line = keys(run) if callable(keys) else history.line(*keys)
                if not line.steps:
                    continue
                part = f"{metric[1]} of the layers" if isinstance(metric, tuple) else ""
                name = ", ".join(filter(None, (part, run.name if several else ""))) or self.y
                style = {"dash": dash} | ({"shape": "hv"} if "y" in self.integers else {})
                options: dict[str, Any] = {"line": style, "showlegend": several or len(self.metrics) > 1}
                drawn = line, name, color(run.index), run.index
                traces += [trace(*drawn, **options)] if self.is_setting else noisy(*drawn, **options)
            if len(traces) == before:
                missing.append(run.name)
        if not traces:
            return f"{self.title} is not shown: {TIMINGS if self.timings else METRICS} does not record it."
        absent = f"These runs do not record it: {', '.join(missing)}." if missing else ""
        figure = make_figure(traces, self.y, integers=self.integers, scale=self.scale, boundaries=_boundaries(runs))
        return Plot(self.title, figure, f"{self.note or (_phases(runs) if self.is_setting else '')} {absent}".strip())


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


LEARNING_RATE = Comparison("Learning rate", "learning rate of the matrices", ["learning_rate"], is_setting=True)
BATCH = Comparison("Batch", "tokens per step, with padding", [_batch], is_setting=True, integers="xy")
GRAD_NORM = Comparison("Gradient norm", "gradient norm before clipping", ["grad_norm"], scale="log")
_THROUGHPUT = "Tokens in the loss over the time of the step, without evaluation, saving and compilation."
TOKENS_PER_SECOND = Comparison("Throughput", "tokens/s", ["tokens_per_second"], timings=True, note=_THROUGHPUT)
DATA_WAIT = Comparison(
    "Data wait",
    "wait for the batch (ms per step)",
    [lambda run: scaled(run.timings.line("data_wait"), 1000)],
    timings=True,
    note="The wait happens while the previous step runs; only a wait longer than a step costs time.",
)
MFU = Comparison("MFU", "model FLOPs utilization (%)", [lambda run: scaled(run.timings.line("mfu"), 100)], timings=True)
_NO_MFU = "MFU is not shown: the peak FLOP/s of these devices is not known."
FLOPS = Comparison("Model FLOP/s", "model FLOP/s", ["flops_per_second"], timings=True, note=_NO_MFU)
ENTROPY = Comparison(
    "Entropy of the expert load",
    "entropy over its maximum",
    [("load_entropy", "mean"), ("load_entropy", "lowest")],
    note="1: all experts of a layer get as many tokens. 0: one expert gets them all.",
)
LARGEST_LOAD = Comparison(
    "Largest expert load", "largest load / mean load", [("max_load", "mean"), ("max_load", "highest")]
)
SKIP_RATE = Comparison(
    "Tokens that skip the experts", "share of the tokens", [("skip_rate", "mean"), ("skip_rate", "highest")]
)
BIAS_RANGE = Comparison("Balancing biases", "largest minus smallest bias", [("bias_range", "highest")])


def utilization(runs: Sequence[RunData]) -> Plot | str:
    """Plot the model FLOPs utilization, or the FLOP/s if no device has a known peak."""
    return (MFU if any(run.timings.line("mfu").steps for run in runs) else FLOPS).plot(runs)


def _compressors(runs: Sequence[RunData]) -> list[tuple[str, float, str]]:
    """Return label, nats per held-out token and dash of gzip and xz, once for runs in which they agree."""
    levels: dict[tuple[str, float], list[str]] = {}
    for run in runs:
        for name in ("gzip", "xz"):
            if name in run.baselines and (nats := run.nats_per_token(run.baselines[name])) is not None:
                levels.setdefault((name, round(nats, 4)), []).append(run.name)
    shared = len(set(map(tuple, levels.values()))) == 1
    labels = {key: key[0] if shared else f"{key[0]}, {', '.join(names)}" for key, names in levels.items()}
    return [(labels[name, nats], nats, DASHES[name]) for name, nats in levels]


def _boundaries(runs: Sequence[RunData]) -> list[tuple[int, int]]:
    return [boundary for run in runs for boundary in run.boundaries]


def _phases(runs: Sequence[RunData]) -> str:
    names = []
    for run in runs:
        if run.boundaries:
            phases = ", ".join(f"{name} from step {step:,}" for step, name in run.metrics.phases)
            names.append(f"{phases} ({run.name})" if len(runs) > 1 else phases)
    return f"Dotted vertical lines separate the phases: {'; '.join(names)}." if names else ""
