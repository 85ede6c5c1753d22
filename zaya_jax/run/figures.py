"""Shared style and atomic saving of all plots."""

import contextlib
import io
import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from zaya_jax.errors import printable
from zaya_jax.run.files import write_atomically

Size = tuple[float, float]  # width and height in inches
FAINT = 0.25  # opacity of raw values behind smoothed ones


@contextlib.contextmanager
def panels(
    path: Path, title: str, heights: Sequence[float] = (1.0,), size: Size = (7.5, 4.5), *, shared: bool = True
) -> Iterator[list[Any]]:
    """Yield the vertically stacked panels of a matplotlib figure, written as PNG, atomically, at the end of the block.

    The relative `heights` of the panels, which may have a `shared` x axis, add up to the `size`.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(printable(title, 500), parse_math=False, fontsize="medium")
    for panel in figure.subplots(len(heights), 1, sharex=shared, height_ratios=heights, squeeze=False)[:, 0]:
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    yield figure.axes
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    write_atomically(path, picture.getvalue())


def legend_beside(panel: Any) -> None:
    """Put the legend to the right of a panel, outside the data; a panel without labels gets no legend."""
    if panel.get_legend_handles_labels()[0]:
        place = {"loc": "upper left", "bbox_to_anchor": (1.01, 1), "borderaxespad": 0}
        panel.legend(frameon=False, fontsize="small", **place)


def integer_steps(panel: Any) -> None:
    """Restrict the ticks of the x axis to integers."""
    from matplotlib.ticker import MaxNLocator

    panel.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))


def smoothed(values: Sequence[float], width: int) -> list[float]:
    """Return a centered moving average over `width` values, ignoring non-finite ones; NaN stays NaN."""
    known = [math.isfinite(value) for value in values]
    sums = [0.0, *accumulate(value if finite else 0.0 for value, finite in zip(values, known, strict=True))]
    counts = [0, *accumulate(known)]
    means = []
    for index, finite in enumerate(known):
        start, stop = max(0, index - width // 2), min(len(known), index + width // 2 + 1)
        means.append((sums[stop] - sums[start]) / (counts[stop] - counts[start]) if finite else math.nan)
    return means
