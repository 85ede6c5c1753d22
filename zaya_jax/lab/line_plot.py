"""Line plots for benchmarks, as PNG."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path

from zaya_jax.run.figures import FAINT, integer_steps, legend_beside, panels

_SEED = " seed "


def draw_lines(path: Path, lines: Mapping[str, Sequence[Sequence[float]]], *, title: str, x: str, y: str,
               marks: Mapping[float, str] | None = None, logarithmic: str = "") -> None:  # fmt: skip
    """Plot lines. Lines whose names differ only in ' seed N' become their mean, in a band from minimum to maximum.

    Args:
      path: PNG file to write.
      lines: (xs, ys) by name; all seeds of a line have the same xs.
      title: title of the plot.
      x: label of the x axis, with its unit.
      y: label of the y axis, with its unit.
      marks: text by x position, for vertical lines.
      logarithmic: axes with a logarithmic scale, such as 'xy'.
    """
    with panels(path, title) as (panel,):
        groups: dict[str, list[Sequence[Sequence[float]]]] = {}
        for name, line in lines.items():
            groups.setdefault(name.partition(_SEED)[0], []).append(line)
        for index, (name, seeds) in enumerate(groups.items()):
            xs = seeds[0][0]
            at = list(zip(*(ys for _, ys in seeds), strict=True))
            panel.plot(xs, [statistics.mean(values) for values in at], color=f"C{index}", label=name,
                       marker="o" if len(xs) == 1 else None)  # fmt: skip
            if len(seeds) > 1:
                panel.fill_between(
                    xs, list(map(min, at)), list(map(max, at)), color=f"C{index}", alpha=FAINT, linewidth=0
                )
        for position, text in (marks or {}).items():
            panel.axvline(position, color="grey", linewidth=0.8, linestyle="dotted")
            panel.annotate(f" {text}", (position, 1), xycoords=("data", "axes fraction"), verticalalignment="top",
                           fontsize="small", color="grey")  # fmt: skip
        scale = {f"{axis}scale": "log" for axis in logarithmic}
        panel.set(xlabel=x, ylabel=y, **scale)
        if "x" not in logarithmic:
            integer_steps(panel)
        legend_beside(panel)


def draw_spread(path: Path, rows: Mapping[str, Sequence[float]], *, title: str, x: str) -> None:
    """Plot the values of each row as points on a line, with a bar for their mean.

    Args:
      path: PNG file to write.
      rows: values by name, from top to bottom.
      title: title of the plot.
      x: label of the x axis, with its unit.
    """
    with panels(path, title, size=(7.5, 1.2 + 0.3 * len(rows))) as (panel,):
        for index, values in enumerate(rows.values()):
            panel.barh(index, statistics.mean(values), height=0.6, color="C0", alpha=FAINT)
            panel.scatter(values, [index] * len(values), color="C0", s=18, zorder=2)
        panel.axvline(0, color="grey", linewidth=0.8)
        panel.set(xlabel=x, yticks=range(len(rows)), yticklabels=list(rows))
        panel.invert_yaxis()
