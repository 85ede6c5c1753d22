"""The plot of a result, by the verb that wrote it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.lab.line_plot import draw_lines
from zaya_jax.run.figures import legend_beside, panels

Result = dict[str, Any]


def draw(verb: str, path: Path, result: Result) -> str:
    """Plot a result to a PNG file, if its verb has a plot; returns what the plot shows."""
    if verb not in _PLOTS:
        return ""
    plot, shows = _PLOTS[verb]
    plot(path, result)
    longest = max((row.get("length", 0) for row in result.get("results", ())), default=0)
    return shows.format(what=result.get("what"), longest=longest)


def _memory(path: Path, result: Result) -> None:
    """Plot bandwidth against the size of an array, from the result of `measure_memory`."""
    lines = {}
    for row in result["results"]:
        xs, ys = lines.setdefault(row["operation"], ([], []))
        xs.append(row["bytes"])
        ys.append(row["bytes_per_second"] / 1e9)
    draw_lines(path, lines, title="Memory bandwidth", x="bytes of an array", y="bandwidth (GB/s)", logarithmic="x")


def _gemm(path: Path, result: Result) -> None:
    """Plot the result of `gemm_sweep.measure_gemm` to a PNG file; nothing if no square was measured."""
    maximum = result["maximum"]
    if not maximum:
        return
    rows = [row for row in result["results"] if "failed" not in row]
    families = list(dict.fromkeys(row["family"] for row in rows))
    heights = [1.0 if name == "square" else max(1.0, 0.09 * sum(row["family"] == name for row in rows))
               for name in families]  # fmt: skip
    with panels(path, "Matrix products", heights, (8.5, 3.2 * sum(heights)), shared=False) as stacked:
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


def _collectives(path: Path, result: Result) -> None:
    """Plot bus bandwidth and latency of the result of `collectives_sweep.measure_collectives` to a PNG file."""
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for row in result["results"]:
        half = row.get("out_of_place") or row["in_place"]
        name = f"{row['operation']}, {row['dtype']}, {row['devices']} devices"
        if row["groups"] > 1:
            name += f" along {' and '.join(row['axes'])}"
        lines.setdefault(name, []).append((row["bytes"], half["busbw"] / 1e9, half["p50"] * 1e6))
    with panels(path, "Collectives: bus bandwidth and latency", (1.0, 1.0), (9.0, 6.6), shared=False) as stacked:
        bandwidth, latency = stacked
        for name, points in lines.items():
            sizes, busbw, micros = zip(*points, strict=True)
            bandwidth.plot(sizes, busbw, marker=".", label=name)
            latency.plot(sizes, micros, marker=".", label=name)
        bandwidth.set(xlabel="size (bytes)", ylabel="bus bandwidth (GB/s)", xscale="log", ylim=(0, None))
        latency.set(xlabel="size (bytes)", ylabel="median time (µs)", xscale="log", yscale="log")
        legend_beside(bandwidth)


def _step(path: Path, result: Result) -> None:
    """Plot the result of `measure.break_down` to a PNG file."""
    with panels(path, f"Time of a {result['what']} by part", (1.0,), (8.5, 2.8)) as (panel,):
        bars = ["measured"] if result["not_predicted"] else ["measured", "predicted"]
        starts = dict.fromkeys(bars, 0.0)
        # One colour has one meaning: each part keeps its own in both bars; what no part explains is grey.
        parts = [(name, row, f"C{index}" if index < 10 else f"C{index - 10}", "//" if index >= 10 else "")
                 for index, (name, row) in enumerate(result["parts"].items())]  # fmt: skip
        parts += [("exposed collectives", {"measured": result["exposed_collectives"]}, "black", ""),
                  ("unattributed", {"measured": result["unattributed"]}, "lightgrey", "")]  # fmt: skip
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


def _context(path: Path, result: Result) -> None:
    """Plot memory per device against the number of devices, from the rows of the longest sequence of a result."""
    length = max(row["length"] for row in result["results"])
    curves = memory_curves([row for row in result["results"] if row["length"] == length])
    lines = {kind: (list(curve), [size / 2**20 for size in curve.values()]) for kind, curve in curves.items()}
    first = next(iter(curves.values()))
    single_device_bytes = first.get(1)
    if single_device_bytes is not None:
        devices = list(first)
        lines["one device / N (ideal)"] = (devices, [single_device_bytes / n / 2**20 for n in devices])
    draw_lines(path, lines, title=f"Attention over {length:,} tokens, forward and backward", x="number of devices N",
               y="memory per device (MiB)")  # fmt: skip


def memory_curves(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, int]]:
    """Return bytes per device by number of devices, for each kind of context-parallel attention.

    The row of one device belongs to all kinds.
    """
    kinds = dict.fromkeys(row["attention"] for row in rows)
    return {kind: {row["devices"]: row["bytes_per_device"] for row in rows
                   if row["attention"] == kind or row["devices"] == 1} for kind in kinds}  # fmt: skip


def _sizing(path: Path, result: Result) -> None:
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


# The function that plots a result, and what its plot shows, for readers who do not see it.
_PLOTS: dict[str, tuple[Callable[[Path, Result], None], str]] = {
    "memory": (_memory, "Bandwidth of each operation against the size of an array."),
    "gemm": (_gemm, "Speed of squares against their size, and the share of the fastest one that other products reach."),
    "collectives": (_collectives, "Bus bandwidth and median time of each collective against the size."),
    "step": (_step, "Time of a {what} by part, as a stacked bar."),
    "context": (_context, "Memory per device of attention over {longest:,} tokens against the number of devices."),
    "sizing": (_sizing, "Training throughput against decode latency."),
}
