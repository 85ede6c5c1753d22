"""The parts that all plots of the page share, as plotly describes them: traces, axes, legend."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple

from zaya_jax.aegis.report.curves import Line, significant, thin
from zaya_jax.run.figures import FAINT, smoothed

# A color means the same run, source or role in all plots. Color-blind readers can distinguish the first ones.
_COLORS = ("0072b2", "d55e00", "009e73", "cc79a7", "e69f00", "56b4e9", "7f3c8d", "7a7a7a", "8c6d31", "b3261e", "c4c4c4")
_PARTS = 50  # parts of a run that a smoothed line is a mean over
_ROW, _LEGEND = 20, 240  # pixels of a name in the legend, and of the highest legend
_MARKERS = 60  # at most, so that they stay distinguishable
_HEIGHT = 350  # pixels of a plot without its legend

DASHES = {"gzip": "dot", "xz": "dashdot", "xz_given_train": "dash"}  # of the lines of compressors

Scale = Literal["data", "zero", "log"]


class Plot(NamedTuple):
    """A plot of the page."""

    title: str  # what it shows
    figure: dict[str, Any]  # plotly's `data`, `layout` and, with a slider, `frames`
    note: str = ""  # a sentence below it


def color(index: int) -> str:
    """Return the color of a run, source or role."""
    return f"#{_COLORS[index % len(_COLORS)]}"


def plain(name: str) -> str:
    """Escape a name that a run gives, in which plotly would read tags, entities and variables."""
    return name.replace("&", "&amp;").replace("<", "&lt;").replace("%{", "&#37;{")


def scatter(xs: Sequence[float], ys: Sequence[Any], name: str, run: int, **options: Any) -> dict[str, Any]:
    """Make a line of plotly; from `run`, its index, the page finds the tokens and the time of each step."""
    return {"type": "scatter", "x": xs, "y": ys, "name": plain(name), "meta": {"run": run}, "mode": "lines", **options}


def trace(line: Line, name: str, hue: str, run: int, /, **options: Any) -> dict[str, Any]:
    """Make a line without smoothing, of the color `hue`, with plotly's `options`; see `scatter` for `run`."""
    xs, ys = thin(line.steps, line.values)
    style = {"color": hue, "width": 2} | options.pop("line", {})
    return scatter(xs, list(map(significant, ys)), name, run, line=style, **options)


def noisy(line: Line, name: str, hue: str, run: int, /, **options: Any) -> list[dict[str, Any]]:
    """Make a smoothed line over the faint raw one, which is left out if smoothing changes nothing."""
    width = len(line.values) // _PARTS
    smooth = Line(line.steps, smoothed(line.values, width))
    traces = [trace(smooth, name, hue, run, legendgroup=name, **options)]
    if width > 1:
        raw = trace(line, f"{name}, each step", hue, run, legendgroup=name, showlegend=False, opacity=FAINT)
        traces.insert(0, raw | {"line": {"color": hue, "width": 1}})
    return traces


def evaluated(line: Line, name: str, hue: str, run: int) -> dict[str, Any]:
    """Make a line of the values of a few steps, with a marker for each unless they are many."""
    mode = "lines+markers" if len(line.steps) <= _MARKERS else "lines"
    return trace(line, name, hue, run, mode=mode, line={"dash": "dash"}, marker={"size": 7, "symbol": "diamond"})


def level(line: Line, value: float, name: str, dash: str, run: int) -> dict[str, Any]:
    """Make a horizontal line that is as long as `line`."""
    style = {"color": "#222", "width": 1.5, "dash": dash}
    return scatter([line.steps[0], line.steps[-1]], [significant(value)] * 2, name, run, line=style)


def heat_map(
    xs: Sequence[int], rows: int, z: Sequence[Any], limits: tuple[float, float], bar: str, **options: Any
) -> dict[str, Any]:
    """Make a heat map of `rows`, whose colors span `limits`, with the title `bar` of the bar of colors."""
    title = {"title": {"text": bar, "side": "top"}, "thickness": 12, "len": 1, "outlinewidth": 0}
    bounds = {"zmin": limits[0], "zmax": limits[1], "colorbar": title | options.pop("colorbar", {})}
    return {"type": "heatmap", "x": xs, "y": list(range(rows)), "z": z, **bounds, **options}


def make_figure(
    traces: Sequence[dict[str, Any]],
    y: str,
    *,
    x: str = "step",
    integers: str = "x",
    scale: Scale = "data",
    boundaries: Iterable[tuple[int, int]] = (),
    **layout: Any,
) -> dict[str, Any]:
    """Make a figure with the labels `x` and `y` of the axes; those in `integers`, such as 'xy', have integer values.

    The y axis reaches as far as the data, or from zero, or is logarithmic. `boundaries` are index of a run and step
    after which a phase starts, for vertical lines; `layout` is plotly's, in addition.
    """
    named = sum(bool(each.get("showlegend", True)) for each in traces)
    axis = {"automargin": True, "gridcolor": "#e4e4e4", "zeroline": False, "linecolor": "#888", "ticks": "outside"}
    form = {letter: {"tickformat": ",d"} for letter in integers}
    values = {"rangemode": "tozero"} if scale == "zero" else _log_ticks(traces) if scale == "log" else {}
    values |= {"title": {"text": y, "standoff": 8}, "exponentformat": "SI"}
    legend = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "x": 0, "maxheight": 0.7}
    dotted = {"type": "line", "yref": "paper", "y0": 0, "y1": 1, "line": {"color": "#888", "width": 1, "dash": "dot"}}
    look = {
        "height": _HEIGHT + min(_ROW * named, _LEGEND),
        "margin": {"l": 8, "r": 12, "t": 34, "b": 8},
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": "#222"},
        "plot_bgcolor": "white",
        "xaxis": {**axis, **form.get("x", {}), "title": {"text": x, "standoff": 6}},
        "yaxis": {**axis, **form.get("y", {}), **values},
        "legend": {**legend, "traceorder": "normal"},
        "showlegend": True,
        "hovermode": "closest",
        "meta": {"integers": integers, "steps": x == "step"},
        "shapes": [{**dotted, "x0": step, "x1": step, "name": str(run)} for run, step in boundaries],
    }
    return {"data": list(traces), "layout": {**look, **layout}}


def _log_ticks(traces: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return a logarithmic axis with ticks at 1, 2 and 5 times powers of ten, or over a wide range at powers of ten."""
    known = [value for each in traces for value in each["y"] if value is not None and value > 0] or [1.0]
    low, high = math.floor(math.log10(min(known))), math.ceil(math.log10(max(known)))
    digits = (1, 2, 5) if high - low <= 2 else (1,)
    ticks = [float(f"{digit}e{power}") for power in range(low, high + 1) for digit in digits]
    return {"type": "log", "tickvals": ticks, "ticktext": [f"{tick:g}" for tick in ticks]}
