"""Plot a run as `loss.png`."""

import itertools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from zaya_jax.run.figures import FAINT, integer_steps, legend_beside, panels, smoothed

_SMOOTH = 20  # parts of the run that the smoothed loss is a mean over
_NAMED_LAYERS = 8  # of more, only the first and the last are in the legend


def plot_run(rows: list[dict[str, Any]], path: Path, compressors: Mapping[str, float] | None = None) -> None:
    """Plot training and held-out loss, and the expert-load entropy of each layer, from the rows of `metrics.jsonl`.

    `compressors` has the nats per held-out token that general compressors need, by name; of these, gzip and xz are
    drawn.
    """
    with panels(path, f"{path.parent.name}: loss and expert load", (2, 1), (7.5, 6)) as (loss, entropy):
        steps, train = [row["step"] for row in rows], _numbers(row["loss"] for row in rows)
        loss.plot(steps, train, color="C0", linewidth=0.8, alpha=FAINT)
        loss.plot(steps, smoothed(train, len(train) // _SMOOTH), color="C0", label="training")
        held = [(row["step"], row["heldout_loss"]) for row in rows if row.get("heldout_loss") is not None]
        if held:
            loss.plot(*zip(*held, strict=True), color="C1", marker="o", markersize=3, label="held-out")
        for name, style in (("gzip", ":"), ("xz", "--")):
            if compressors and name in compressors:
                loss.axhline(compressors[name], color="black", linewidth=1, linestyle=style, label=name)
        loss.set_ylabel("loss (nats/token)")
        layers = list(zip(*(row["load_entropy"] for row in rows), strict=True))
        for layer, values in enumerate(layers):
            named = len(layers) <= _NAMED_LAYERS or layer in (0, len(layers) - 1)
            shade = layer / max(len(layers) - 1, 1)
            color = f"C{layer}" if len(layers) <= _NAMED_LAYERS else (shade, 0.35, 1 - shade)
            label = f"layer {layer}" if named else None
            entropy.plot(steps, _numbers(values), color=color, linewidth=0.8, label=label)
        entropy.set(xlabel="step", ylabel="expert-load entropy\n(1: all experts alike)", ylim=(0, 1.02))
        for earlier, later in itertools.pairwise(rows):
            if earlier.get("phase") != later.get("phase"):
                for panel in (loss, entropy):
                    panel.axvline(earlier["step"] + 0.5, color="grey", linewidth=0.8)
                style = {"verticalalignment": "top", "fontsize": "small", "color": "grey"}
                place = (earlier["step"] + 0.5, 1)
                loss.annotate(f" {later['phase']}", place, xycoords=("data", "axes fraction"), **style)
        for panel in (loss, entropy):
            legend_beside(panel)
        integer_steps(entropy)


def _numbers(values: Iterable[float | None]) -> list[float]:
    """Replace None, which stands for a value that was not finite, by NaN, which leaves a gap in the line."""
    return [math.nan if value is None else value for value in values]
