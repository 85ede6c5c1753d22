"""Plots of results, by the verb that wrote each, and line plots for benchmarks, as PNG."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.run.figures import FAINT, integer_steps, legend_beside, panels

Result = dict[str, Any]


def draw_lines(
    path: Path,
    lines: Mapping[str, Sequence[Sequence[float]]],
    *,
    title: str,
    x: str,
    y: str,
    logarithmic: str = "",
) -> None:
    """Plot lines, each (xs, ys) by name, to a PNG file; `logarithmic` names axes with such a scale, such as 'xy'."""
    with panels(path, title) as (panel,):
        for name, (xs, ys) in lines.items():
            panel.plot(xs, ys, label=name, marker="o" if len(xs) == 1 else None)
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


def draw(verb: str, path: Path, result: Result) -> None:
    """Plot the result of a verb with `--png` to a PNG file."""
    _PLOTS[verb](path, result)


def _lines(rows: Sequence[Result], name: Callable[[Result], str], *values: Callable[[Result], float]) -> dict[str, Any]:
    points: dict[str, list[list[float]]] = {}
    for row in rows:
        points.setdefault(name(row), []).append([value(row) for value in values])
    return {line: list(zip(*each, strict=True)) for line, each in points.items()}


def _memory(path: Path, result: Result) -> None:
    speeds = (lambda row: row["bytes"]), (lambda row: row["bytes_per_second"] / 1e9)
    lines = _lines(result["results"], lambda row: row["operation"], *speeds)
    draw_lines(path, lines, title="Memory bandwidth", x="bytes of an array", y="bandwidth (GB/s)", logarithmic="x")


def _gemm(path: Path, result: Result) -> None:
    """Plot squares against their size, and shares of the maximum; nothing if no square was measured."""
    maximum, families = result["maximum"], dict[str, list[Result]]()
    if not maximum:
        return
    for row in result["results"]:
        if "failed" not in row:
            families.setdefault(row["family"], []).append(row)
    heights = [1.0 if family == "square" else max(1.0, 0.09 * len(rows)) for family, rows in families.items()]
    with panels(path, "Matrix products", heights, (8.5, 3.2 * sum(heights)), shared=False) as stacked:
        for panel, (family, rows) in zip(stacked, families.items(), strict=True):
            panel.tick_params(labelbottom=True)
            if family == "square":
                sizes = [row["size"] for row in rows]
                for name in ("warm", "cold"):
                    panel.plot(sizes, [row[f"{name}_flops_per_second"] / 1e9 for row in rows], label=name, marker=".")
                panel.set(xlabel="rows and columns", ylabel="GFLOP/s", title="square")
                panel.legend(frameon=False)
            else:
                shares = [row["warm_flops_per_second"] / maximum for row in rows][::-1]
                panel.barh([row["name"] for row in rows][::-1], shares)
                panel.set(xlabel="share of the maximum", title=family.replace("_", "–"), xlim=(0, max(1.05, *shares)))
                panel.tick_params(labelsize="small")


def _collectives(path: Path, result: Result) -> None:
    def name(row: Result) -> str:
        along = f" along {' and '.join(row['axes'])}" if row["groups"] > 1 else ""
        return f"{row['operation']}, {row['dtype']}, {row['devices']} devices{along}"

    def half(row: Result) -> Result:
        return row.get("out_of_place") or row["in_place"]

    values = (lambda row: row["bytes"]), (lambda row: half(row)["busbw"] / 1e9), (lambda row: half(row)["p50"] * 1e6)
    with panels(path, "Collectives: bus bandwidth and latency", (1.0, 1.0), (9.0, 6.6), shared=False) as stacked:
        bandwidth, latency = stacked
        for line, (sizes, busbw, micros) in _lines(result["results"], name, *values).items():
            bandwidth.plot(sizes, busbw, marker=".", label=line)
            latency.plot(sizes, micros, marker=".", label=line)
        bandwidth.set(xlabel="size (bytes)", ylabel="bus bandwidth (GB/s)", xscale="log", ylim=(0, None))
        latency.set(xlabel="size (bytes)", ylabel="median time (µs)", xscale="log", yscale="log")
        legend_beside(bandwidth)


def _step(path: Path, result: Result) -> None:
    bars = ["measured"] if result["not_predicted"] else ["measured", "predicted"]
    starts, exposed = [0.0] * len(bars), "exposed collectives"
    # One colour has one meaning: each part keeps its own in both bars; what no part explains is grey.
    styles = {name: (f"C{index % 10}", "//" if index >= 10 else "") for index, name in enumerate(result["parts"])}
    styles |= {exposed: ("black", ""), "unattributed": ("lightgrey", "")}
    rows = result["parts"] | {exposed: {"measured": result["exposed_collectives"]}}
    rows["unattributed"] = {"measured": result["unattributed"]}
    with panels(path, f"Time of a {result['what']} by part", (1.0,), (8.5, 2.8)) as (panel,):
        for name, row in rows.items():
            widths, (color, hatch) = [1e3 * (row.get(bar) or 0.0) for bar in bars], styles[name]
            if any(widths):
                style = {"color": color, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
                panel.barh(bars, widths, left=starts, label=name, **style)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        panel.set(xlabel="time (ms)")
        panel.invert_yaxis()
        legend_beside(panel)


def _context(path: Path, result: Result) -> None:
    """Plot memory per device against the number of devices, for the longest sequence."""
    length = max(row["length"] for row in result["results"])
    longest, lines = [row for row in result["results"] if row["length"] == length], {}
    for kind in dict.fromkeys(row["attention"] for row in longest):  # the row of one device belongs to all
        own = [row for row in longest if row["attention"] == kind or row["devices"] == 1]
        lines[kind] = [row["devices"] for row in own], [row["bytes_per_device"] / 2**20 for row in own]
    devices, (one, *_) = next(iter(lines.values()))
    if 1 in devices:
        lines["one device / N (ideal)"] = devices, [one / count for count in devices]
    title = f"Attention over {length:,} tokens, forward and backward"
    draw_lines(path, lines, title=title, x="number of devices N", y="memory per device (MiB)")


def _sizing(path: Path, result: Result) -> None:
    """Plot the result of `sizing --suggest`; nothing from one without."""
    if "front" not in result:
        return
    what = f"{result['phase']} on {result['devices']:,} × {result['hardware']}, predicted"
    own, front = result["configuration"], [_speeds(row) for row in result["front"]]
    with panels(path, f"Widths for training and decoding: {what}") as (panel,):
        panel.plot(*zip(*front, strict=True), color="C0", marker="o", linewidth=1, label="Pareto front")
        for number, point in enumerate(front, 1):
            panel.annotate(f" {number}", point, textcoords="offset points", xytext=(3, 3), fontsize="small", color="C0")
        if own is not None:
            style = {"color": "C1", "marker": "s", "linestyle": "none"}
            panel.plot(*_speeds(own), label="the configuration's\nown widths", **style)
        decoding = f"decoding after {result['context']:,} tokens (ms/token)"
        panel.set(xlabel="training (thousand tokens/s)", ylabel=decoding)
        panel.margins(0.15)
        legend_beside(panel)


def _speeds(row: Result) -> tuple[float, float]:
    return row["tokens_per_second"] / 1e3, 1e3 * row["seconds_per_token"]


_MAKERS = (_memory, _gemm, _collectives, _step, _context, _sizing)
_PLOTS: dict[str, Callable[[Path, Result], None]] = {make.__name__.removeprefix("_"): make for make in _MAKERS}
