"""Plots of one run: losses by source, norms by role, experts by layer, and where the time went."""

import math
from typing import Any

from zaya_jax.aegis.report.curves import significant
from zaya_jax.aegis.report.page_plot import Plot, color, evaluated, level, make_figure, noisy, plain
from zaya_jax.aegis.report.run_data import RunData
from zaya_jax.run.folder import METRICS

_LOG_RANGE = 2.0  # of the expert load, in powers of two
_LAYER = 8  # pixels that each layer adds to the height of a heat map
_HEADS = {
    "loss_by_source": "Loss by source",
    "grad_norm_by_role": "Gradient norm by role",
    "update_norm_by_role": "Update norm by role",
}
_BUCKETS = {
    "productive": "#009e73",
    "wasted_progress": "#b3261e",
    "infrastructure_recovery": "#d55e00",
    "data_loading": "#e69f00",
    "other": "#c4c4c4",
    "evaluation": "#0072b2",
    "checkpoint_save": "#56b4e9",
    "checkpoint_restore": "#7f3c8d",
    "program_startup": "#cc79a7",
    "training_preparation": "#8c6d31",
    "device_initialization": "#7a7a7a",
}
_ROLES = ("attention", "router", "expert", "embedding", "convolution", "norm", "scale", "temperature", "bias")


def loss_by_source(run: RunData) -> Plot | str | None:
    """Plot training and held-out loss of each source; None if there is only one."""
    sources = run.metrics.parts("loss_by_source")
    held = run.metrics.parts("heldout_loss_by_source")
    if len(sources) < 2 and len(held) < 2:
        return None
    traces = list[dict[str, Any]]()
    for index, source in enumerate(dict.fromkeys([*sources, *held])):
        if (line := run.metrics.line("loss_by_source", source)).steps:
            traces += noisy(line, f"{source}, training", color(index), run.index)
        if (line := run.metrics.line("heldout_loss_by_source", source)).steps:
            traces.append(evaluated(line, f"{source}, held-out", color(index), run.index))
    return Plot("Loss by source", make_figure(traces, "loss (nats/token)", boundaries=run.boundaries))


def bits_per_byte(run: RunData) -> Plot | str:
    """Plot the held-out loss of each source in bits per byte, with compressors."""
    traces = [
        evaluated(line, source, color(index), run.index)
        for index, (source, line) in enumerate(run.heldout_bits.items())
    ]
    if not traces:
        return (
            "Held-out bits per byte are not shown: the run has not recorded the size of its held-out text. Let the "
            f"run end, or run python -m zaya_jax.evaluate {run.path}."
        )
    dashes = {"gzip": "dot", "xz": "dashdot", "xz_given_train": "dash"}
    traces += [
        level(
            run.metrics.line("step"),
            run.baselines[name],
            name.replace("_given_train", " after the training text"),
            dash,
            run.index,
        )
        for name, dash in dashes.items()
        if name in run.baselines
    ]
    return Plot("Held-out bits per byte", make_figure(traces, "held-out loss (bits/byte)", boundaries=run.boundaries))


def norms(run: RunData, metric: str) -> Plot | str:
    """Plot norms of each role of parameters: `grad_norm_by_role` or `update_norm_by_role`."""
    title, traces = _HEADS[metric], list[dict[str, Any]]()
    present = run.metrics.parts(metric)
    for role in sorted(present, key=lambda role: _ROLES.index(role) if role in _ROLES else len(_ROLES)):
        index = _ROLES.index(role) if role in _ROLES else len(_ROLES)
        line = run.metrics.line(metric, role)
        if any(value > 0 for value in line.values):  # the axis is logarithmic
            traces += noisy(line, role, color(index), run.index)
    if not traces:
        return f"{title} is not shown: {METRICS} does not record it."
    return Plot(title, make_figure(traces, title.lower(), scale="log", boundaries=run.boundaries))


def entropy_by_layer(run: RunData) -> Plot | str:
    """Plot the entropy of the expert load of each layer over the steps."""
    kept = run.metrics.entropy
    layers = max(map(len, kept.items), default=0)
    if not layers:
        return f"Entropy by layer is not shown: {METRICS} does not record load_entropy."
    z = [[significant(row[layer]) if layer < len(row) else None for row in kept.items] for layer in range(layers)]
    heat = {
        "type": "heatmap",
        "x": kept.steps,
        "y": list(range(layers)),
        "z": z,
        "zmin": 0,
        "zmax": 1,
        "colorscale": "Viridis",
        "meta": {"run": run.index},
        "colorbar": _bar("entropy over<br>its maximum"),
        "hovertemplate": "step %{x}, layer %{y}: %{z}<extra></extra>",
    }
    figure = make_figure([heat], "layer", integers="xy", boundaries=run.boundaries, showlegend=False)
    figure["layout"]["height"] += _LAYER * layers
    return Plot(
        "Entropy of the expert load by layer", figure, "A layer that stays dark sends its tokens to few experts."
    )


def expert_load(run: RunData) -> Plot | str:
    """Plot the load of each expert of each layer, with a slider over the steps."""
    kept = run.metrics.loads
    if not kept.items:
        return f"The load of the experts is not shown: {METRICS} does not record expert_counts."
    experts, layers = len(kept.items[-1][0]), len(kept.items[-1])
    maps = [[[_log2(load) for load in layer] for layer in loads] for loads in kept.items]
    frames = [
        {"name": str(step), "data": [{"type": "heatmap", "z": z}]} for step, z in zip(kept.steps, maps, strict=True)
    ]
    powers = range(-int(_LOG_RANGE), int(_LOG_RANGE) + 1)
    ticks = [f"1/{2**-power}" if power < 0 else str(2**power) for power in powers]
    ticks[0], ticks[-1] = f"≤ {ticks[0]}", f"≥ {ticks[-1]}"
    heat = {
        "type": "heatmap",
        "x": list(range(experts)),
        "y": list(range(layers)),
        "z": maps[-1],
        "zmin": -_LOG_RANGE,
        "zmax": _LOG_RANGE,
        "colorscale": "RdBu",
        "reversescale": False,
        "colorbar": _bar("load over<br>uniform") | {"tickvals": list(powers), "ticktext": ticks},
        "hovertemplate": "layer %{y}, expert %{x}: 2^%{z:.2f} × uniform<extra></extra>",
        "xgap": 1,
        "ygap": 1,
    }
    steps = [
        {
            "label": frame["name"],
            "method": "animate",
            "args": [
                [frame["name"]],
                {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}},
            ],
        }
        for frame in frames
    ]
    shown = {"prefix": "step ", "font": {"color": "#222", "size": 13}}
    slider = {
        "active": len(steps) - 1,
        "steps": steps,
        "currentvalue": shown,
        "pad": {"t": 48, "b": 4},
        "ticklen": 0,
        "minorticklen": 0,
        "font": {"color": "#fff"},
    }
    figure = make_figure([heat], "layer", x="expert", integers="xy", showlegend=False, sliders=[slider])
    figure["frames"] = frames
    figure["layout"]["height"] += _LAYER * layers
    return Plot(
        "Expert load",
        figure,
        "Red: the expert gets more tokens than with a uniform load; blue: fewer. Move the slider to another step.",
    )


def goodput(run: RunData) -> Plot | str:
    """Plot where the time of each supervised node went."""
    if not run.nodes:
        return f"Goodput is not shown: {run.name} was not run under python -m zaya_jax.aegis run."
    names = list(map(plain, run.nodes))
    buckets = dict.fromkeys(bucket for node in run.nodes.values() for bucket in node["goodput"]["buckets"])
    traces = []
    for index, bucket in enumerate(buckets):
        seconds = [node["goodput"]["buckets"].get(bucket, 0.0) for node in run.nodes.values()]
        if any(seconds):
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "y": names,
                    "x": list(map(significant, seconds)),
                    "name": bucket.replace("_", " "),
                    "marker": {"color": _BUCKETS.get(bucket, color(index))},
                    "hovertemplate": "%{x:,.1f} s<extra>" + bucket.replace("_", " ") + "</extra>",
                }
            )
    figure = make_figure(traces, "", x="time (s)", integers="", barmode="stack")
    figure["layout"]["height"] += 32 * len(names) - 220
    figure["layout"]["xaxis"]["tickformat"] = ","
    return Plot("Where the time went", figure, "Goodput is the share of productive time: steps that the run kept.")


def _bar(title: str) -> dict[str, Any]:
    return {"title": {"text": title, "side": "top"}, "thickness": 12, "len": 1, "outlinewidth": 0}


def _log2(load: float) -> float | None:
    """Return the logarithm of a load; the lowest of the scale for an expert without tokens."""
    return significant(math.log2(load)) if load > 0 else None if math.isnan(load) else -2 * _LOG_RANGE
