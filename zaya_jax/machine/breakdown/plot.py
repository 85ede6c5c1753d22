"""Plot the breakdown of a step as stacked bars, measured and predicted."""

from pathlib import Path
from typing import Any

from zaya_jax.run.plot import legend_beside, panels

EXPOSED = "exposed collectives"
UNATTRIBUTED = "unattributed"


def draw(path: Path, result: dict[str, Any]) -> None:
    """Plot the result of `measure.break_down` to a PNG file."""
    with panels(path, f"Time of a {result['what']} by part", (1.0,), (8.5, 2.8)) as (panel,):
        bars = ["measured"] if result["not_predicted"] else ["measured", "predicted"]
        starts = dict.fromkeys(bars, 0.0)
        # One colour has one meaning: each part keeps its own in both bars; what no part explains is grey.
        parts = [(name, row, f"C{index}" if index < 10 else f"C{index - 10}", "//" if index >= 10 else "")
                 for index, (name, row) in enumerate(result["parts"].items())]  # fmt: skip
        parts += [(EXPOSED, {"measured": result["exposed_collectives"]}, "black", ""),
                  (UNATTRIBUTED, {"measured": result[UNATTRIBUTED]}, "lightgrey", "")]  # fmt: skip
        for name, row, color, hatch in parts:
            if not any(row.get(bar) for bar in bars):
                continue
            widths = [1e3 * (row.get(bar) or 0.0) for bar in bars]
            panel.barh(bars, widths, left=[starts[bar] for bar in bars], color=color, hatch=hatch, edgecolor="white",
                       linewidth=0.5, label=name)  # fmt: skip
            starts = {bar: starts[bar] + width for bar, width in zip(bars, widths, strict=True)}
        panel.set(xlabel="time (ms)")
        panel.invert_yaxis()
        legend_beside(panel)
