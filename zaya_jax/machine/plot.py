"""Lines over steps, as a PNG."""

from collections.abc import Mapping, Sequence
from pathlib import Path


def draw_lines(path: Path, lines: Mapping[str, Sequence[Sequence[float]]], *, x: str, y: str,
               marks: Mapping[float, str] | None = None) -> None:  # fmt: skip
    """Draw `lines`, each a pair (steps, values) under its name; lines that share all but 'seed N' share a colour.

    Args:
      path: of the picture.
      lines: by name.
      x: label of the axis.
      y: label of the axis.
      marks: steps with something to say about.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    colours: dict[str, str] = {}
    for name, (steps, values) in lines.items():
        group = name.partition(" seed ")[0]
        label = None if group in colours else group
        colour = colours.setdefault(group, f"C{len(colours)}")
        axes.plot(steps, values, color=colour, linewidth=1, label=label)
    for step, text in (marks or {}).items():
        axes.axvline(step, color="grey", linewidth=0.8, linestyle="dotted")
        axes.annotate(text, (step, 0.02), xycoords=("data", "axes fraction"), fontsize="small", color="grey")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=110, format="png")
