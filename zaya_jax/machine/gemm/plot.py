"""Plot the sweeps: squares as lines, the others as heat maps or bars of the share of the maximum."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zaya_jax.run.plot import panels

_PANEL = 3.2  # inches of height


def draw(path: Path, result: dict[str, Any]) -> None:
    """Plot the result of `sweep.measure_gemm` to a PNG file; nothing if no square was measured."""
    maximum = result["maximum"]
    if not maximum:
        return
    rows = [row for row in result["results"] if "failed" not in row]
    families = list(dict.fromkeys(row["family"] for row in rows))
    heights = [max(1.0, 0.09 * sum(row["family"] == name for row in rows)) if name in ("model", "experts") else 1.0
               for name in families]  # fmt: skip
    with panels(path, "Matrix products", heights, (8.5, _PANEL * sum(heights)), shared=False) as stacked:
        for panel, family in zip(stacked, families, strict=True):
            panel.tick_params(labelbottom=True)
            own = [row for row in rows if row["family"] == family]
            if family == "square":
                sizes = [row["size"] for row in own]
                for name in ("warm", "cold"):
                    panel.plot(sizes, [row[f"{name}_flops_per_second"] / 1e9 for row in own], label=name, marker=".")
                panel.set(xlabel="rows and columns", ylabel="GFLOP/s", title="square")
                panel.legend(frameon=False)
            elif family == "attention":
                _heat_map(panel, own, maximum)
            else:
                names = [row["name"] for row in own][::-1]
                shares = [row["warm_flops_per_second"] / maximum for row in own][::-1]
                panel.barh(names, shares)
                panel.set(xlabel="share of the maximum", title=family.replace("_", "–"), xlim=(0, max(1.05, *shares)))
                panel.tick_params(labelsize="small")


def _heat_map(panel: Any, rows: Sequence[dict[str, Any]], maximum: float) -> None:
    across, down = "length", "query heads per key head"
    xs, ys = (sorted({row[name] for row in rows}) for name in (across, down))
    share = {(row[across], row[down]): row["warm_flops_per_second"] / maximum for row in rows}
    grid = [[share.get((x, y), math.nan) for x in xs] for y in ys]  # a problem that failed leaves its cell empty
    image = panel.imshow(grid, origin="lower", aspect="auto", vmin=0, vmax=max(1.0, *share.values()))
    for j, row in enumerate(grid):
        for i, value in enumerate(row):
            if math.isfinite(value):
                panel.annotate(
                    f"{value:.0%}", (i, j), ha="center", va="center", color="white" if value < 0.6 else "black"
                )
    panel.set(xticks=range(len(xs)), xticklabels=xs, yticks=range(len(ys)), yticklabels=ys, xlabel="tokens of a row",
              ylabel=down, title="attention: share of the maximum")  # fmt: skip
    panel.grid(visible=False)
    panel.figure.colorbar(image, ax=panel)
