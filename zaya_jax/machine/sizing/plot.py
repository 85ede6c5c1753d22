"""Plot the Pareto front of training throughput and decode latency."""

from pathlib import Path
from typing import Any

from zaya_jax.run.plot import legend_beside, panels


def draw(path: Path, result: dict[str, Any]) -> None:
    """Plot the result of `sizing --suggest` to a PNG file; nothing from one without."""
    if "front" not in result:
        return
    hardware = f"{result['devices']:,} × {result['hardware']}"
    with panels(path, f"Widths for training and decoding: {result['phase']} on {hardware}, predicted") as (panel,):
        own, front = result["configuration"], result["front"]
        points = [(row["tokens_per_second"] / 1e3, 1e3 * row["seconds_per_token"]) for row in front]
        panel.plot(*zip(*points, strict=True), color="C0", marker="o", linewidth=1, label="Pareto front")
        for number, point in enumerate(points, 1):
            panel.annotate(f" {number}", point, textcoords="offset points", xytext=(3, 3), fontsize="small", color="C0")
        if own is not None:
            panel.plot(own["tokens_per_second"] / 1e3, 1e3 * own["seconds_per_token"], color="C1", marker="s",
                       linestyle="none", label="the configuration's\nown widths")  # fmt: skip
        panel.set(
            xlabel="training (thousand tokens/s)", ylabel=f"decoding after {result['context']:,} tokens (ms/token)"
        )
        panel.margins(0.15)
        legend_beside(panel)
