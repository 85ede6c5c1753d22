"""Line plots for benchmarks, as PNG."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from zaya_jax.run.figures import FAINT, integer_steps, legend_beside, panels

_SEED = " seed "


def draw_lines(
    path: Path,
    lines: Mapping[str, Sequence[Sequence[float]]],
    *,
    title: str,
    x: str,
    y: str,
    marks: Mapping[float, str] | None = None,
    logarithmic: str = "",
) -> None:
    """Plot lines, each (xs, ys) by name, to a PNG file.

    Lines whose names differ only in ' seed N' have the same xs, and become their mean, in a band from minimum to
    maximum. `marks` are texts of vertical lines by x; `logarithmic` names axes with such a scale, such as 'xy'.
    """
    groups: dict[str, list[Sequence[Sequence[float]]]] = {}
    for name, line in lines.items():
        groups.setdefault(name.partition(_SEED)[0], []).append(line)
    with panels(path, title) as (panel,):
        for index, (name, seeds) in enumerate(groups.items()):
            xs, color = seeds[0][0], f"C{index}"
            at = list(zip(*(ys for _, ys in seeds), strict=True))
            means, marker = [statistics.mean(values) for values in at], "o" if len(xs) == 1 else None
            panel.plot(xs, means, color=color, label=name, marker=marker)
            if len(seeds) > 1:
                panel.fill_between(xs, list(map(min, at)), list(map(max, at)), color=color, alpha=FAINT, linewidth=0)
        for position, text in (marks or {}).items():
            panel.axvline(position, color="grey", linewidth=0.8, linestyle="dotted")
            style = {"verticalalignment": "top", "fontsize": "small", "color": "grey"}
            panel.annotate(f" {text}", (position, 1), xycoords=("data", "axes fraction"), **style)
        panel.set(xlabel=x, ylabel=y, **{f"{axis}scale": "log" for axis in logarithmic})
        if "x" not in logarithmic:
            integer_steps(panel)
        legend_beside(panel)


def draw_spread(path: Path, rows: Mapping[str, Sequence[float]], *, title: str, x: str) -> None:
    """Plot the values of each row, from top to bottom, as points on a line, with a bar for their mean."""
    with panels(path, title, size=(7.5, 1.2 + 0.3 * len(rows))) as (panel,):
        for index, values in enumerate(rows.values()):
            panel.barh(index, statistics.mean(values), height=0.6, color="C0", alpha=FAINT)
            panel.scatter(values, [index] * len(values), color="C0", s=18, zorder=2)
        panel.axvline(0, color="grey", linewidth=0.8)
        panel.set(xlabel=x, yticks=range(len(rows)), yticklabels=list(rows))
        panel.invert_yaxis()
