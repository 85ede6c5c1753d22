"""`loss.png`: what a run looked like."""

import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from zaya_jax.run.files import write_atomically


def plot_run(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw train and held-out loss, and the expert-load entropy of each layer, over the steps of `rows`."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6), layout="constrained")
    FigureCanvasAgg(figure)
    loss, entropy = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    steps = [row["step"] for row in rows]
    loss.plot(steps, _numbers(row["loss"] for row in rows), linewidth=0.8, label="train")
    held = [(row["step"], row["heldout_loss"]) for row in rows if row.get("heldout_loss") is not None]
    if held:
        loss.plot(*zip(*held, strict=True), marker="o", markersize=3, label="held-out")
    loss.set_ylabel("loss (nats/token)")
    loss.legend()
    loss.grid(alpha=0.3)
    for layer, values in enumerate(zip(*(row["load_entropy"] for row in rows), strict=True)):
        entropy.plot(steps, _numbers(values), linewidth=0.8, label=f"layer {layer}")
    entropy.set_ylabel("expert-load entropy")
    entropy.set_xlabel("step")
    entropy.set_ylim(0, 1.02)
    entropy.grid(alpha=0.3)
    if rows and len(rows[0]["load_entropy"]) <= 8:
        entropy.legend(fontsize="small", ncols=4, loc="lower right")
    picture = io.BytesIO()
    figure.savefig(picture, dpi=110, format="png")
    write_atomically(path, picture.getvalue())


def _numbers(values: Iterable[float | None]) -> list[float]:
    """What `metrics.jsonl` holds as null was not finite, and leaves a gap."""
    return [math.nan if value is None else value for value in values]
