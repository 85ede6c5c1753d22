"""Plots of one run: losses by source, norms by role, experts by layer, and where the time went."""

import math
from collections.abc import Iterator
from typing import Any

from zaya_jax.aegis.goodput import BUCKETS
from zaya_jax.aegis.report.curves import significant
from zaya_jax.aegis.report.page_plot import DASHES, Plot, color, evaluated, heat_map, level, make_figure, noisy, plain
from zaya_jax.aegis.report.run_data import RunData
from zaya_jax.run.folder import METRICS

_LOG_RANGE = 2.0  # of the expert load, in powers of two
_LAYER = 8  # pixels that each layer adds to the height of a heat map
_ROLES = ("attention", "router", "expert", "embedding", "convolution", "norm", "scale", "temperature", "bias")


def loss_by_source(run: RunData) -> Plot | str | None:
    """Plot training and held-out loss of each source; None if there is only one."""
    sources, held = (run.metrics.parts(name) for name in ("loss_by_source", "heldout_loss_by_source"))
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
    held = enumerate(run.heldout_bits.items())
    traces = [evaluated(line, source, color(index), run.index) for index, (source, line) in held]
    if not traces:
        how = f"Let the run end, or run python -m zaya_jax.evaluate {run.path}."
        return f"Held-out bits per byte are not shown: the run has not recorded the size of its held-out text. {how}"
    for name, dash in DASHES.items():
        if name in run.baselines:
            label = name.replace("_given_train", " after the training text")
            traces.append(level(run.metrics.line("step"), run.baselines[name], label, dash, run.index))
    return Plot("Held-out bits per byte", make_figure(traces, "held-out loss (bits/byte)", boundaries=run.boundaries))


def norms(run: RunData) -> Iterator[Plot | str]:
    """Plot the norms of the gradient and of the update of each role of parameters."""
    for metric, title in (("grad_norm_by_role", "Gradient norm"), ("update_norm_by_role", "Update norm")):
        traces = list[dict[str, Any]]()
        for index, role in enumerate(dict.fromkeys([*_ROLES, *run.metrics.parts(metric)])):
            line = run.metrics.line(metric, role)
            if any(value > 0 for value in line.values):  # the axis is logarithmic
                traces += noisy(line, role, color(index), run.index)
        figure = make_figure(traces, f"{title.lower()} by role", scale="log", boundaries=run.boundaries)
        absent = f"{title} by role is not shown: {METRICS} does not record it."
        yield Plot(f"{title} by role", figure) if traces else absent


def entropy_by_layer(run: RunData) -> Plot | str:
    """Plot the entropy of the expert load of each layer over the steps."""
    kept = run.metrics.entropy
    layers = max(map(len, kept.items), default=0)
    if not layers:
        return f"Entropy by layer is not shown: {METRICS} does not record load_entropy."
    z = [[significant(row[layer]) if layer < len(row) else None for row in kept.items] for layer in range(layers)]
    hover, meta = "step %{x}, layer %{y}: %{z}<extra></extra>", {"run": run.index}
    bar = "entropy over<br>its maximum"
    heat = heat_map(kept.steps, layers, z, (0, 1), bar, colorscale="Viridis", meta=meta, hovertemplate=hover)
    figure = make_figure([heat], "layer", integers="xy", boundaries=run.boundaries, showlegend=False)
    figure["layout"]["height"] += _LAYER * layers
    note = "A layer that stays dark sends its tokens to few experts."
    return Plot("Entropy of the expert load by layer", figure, note)


def expert_load(run: RunData) -> Plot | str:
    """Plot the load of each expert of each layer, with a slider over the steps."""
    kept = run.metrics.loads
    if not kept.items:
        return f"The load of the experts is not shown: {METRICS} does not record expert_counts."
    experts, layers = len(kept.items[-1][0]), len(kept.items[-1])
    maps = [[[_log2(load) for load in layer] for layer in loads] for loads in kept.items]
    names = list(map(str, kept.steps))
    hover = "layer %{y}, expert %{x}: 2^%{z:.2f} × uniform<extra></extra>"
    bar = {"tickvals": [-2, -1, 0, 1, 2], "ticktext": ["≤ 1/4", "1/2", "1", "2", "≥ 4"]}
    look = {"colorscale": "RdBu", "colorbar": bar, "hovertemplate": hover, "xgap": 1, "ygap": 1}
    limits = (-_LOG_RANGE, _LOG_RANGE)
    heat = heat_map(list(range(experts)), layers, maps[-1], limits, "load over<br>uniform", **look)
    jump = {"mode": "immediate", "frame": {"duration": 0, "redraw": True}, "transition": {"duration": 0}}
    slider = {
        "active": len(names) - 1,
        "steps": [{"label": name, "method": "animate", "args": [[name], jump]} for name in names],
        "currentvalue": {"prefix": "step ", "font": {"color": "#222", "size": 13}},
        **{"pad": {"t": 48, "b": 4}, "ticklen": 0, "minorticklen": 0, "font": {"color": "#fff"}},
    }
    figure = make_figure([heat], "layer", x="expert", integers="xy", showlegend=False, sliders=[slider])
    frames = zip(names, maps, strict=True)
    figure["frames"] = [{"name": name, "data": [{"type": "heatmap", "z": z}]} for name, z in frames]
    figure["layout"]["height"] += _LAYER * layers
    note = "Red: the expert gets more tokens than with a uniform load; blue: fewer. Move the slider to another step."
    return Plot("Expert load", figure, note)


def goodput(run: RunData) -> Plot | str:
    """Plot where the time of each supervised node went."""
    if not run.nodes:
        return f"Goodput is not shown: {run.name} was not run under python -m zaya_jax.aegis run."
    names, traces = list(map(plain, run.nodes)), list[dict[str, Any]]()
    for index, bucket in enumerate(BUCKETS):
        seconds = [node["goodput"]["buckets"].get(bucket, 0.0) for node in run.nodes.values()]
        if any(seconds):
            name = bucket.replace("_", " ")
            look = {"type": "bar", "orientation": "h", "name": name, "marker": {"color": color(index)}}
            hover = f"%{{x:,.1f}} s<extra>{name}</extra>"
            traces.append({**look, "y": names, "x": list(map(significant, seconds)), "hovertemplate": hover})
    figure = make_figure(traces, "", x="time (s)", integers="", barmode="stack")
    figure["layout"]["height"] += 32 * len(names) - 220
    figure["layout"]["xaxis"]["tickformat"] = ","
    return Plot("Where the time went", figure, "Goodput is the share of productive time: steps that the run kept.")


def _log2(load: float) -> float | None:
    """Return the logarithm of a load; the lowest of the scale for an expert without tokens."""
    return significant(math.log2(load)) if load > 0 else None if math.isnan(load) else -2 * _LOG_RANGE
