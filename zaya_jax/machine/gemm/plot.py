"""Plot the sweeps: squares as lines, the others as bars of the share of the maximum."""

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
    heights = [1.0 if name == "square" else max(1.0, 0.09 * sum(row["family"] == name for row in rows))
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
            else:
                names = [row["name"] for row in own][::-1]
                shares = [row["warm_flops_per_second"] / maximum for row in own][::-1]
                panel.barh(names, shares)
                panel.set(xlabel="share of the maximum", title=family.replace("_", "–"), xlim=(0, max(1.05, *shares)))
                panel.tick_params(labelsize="small")
