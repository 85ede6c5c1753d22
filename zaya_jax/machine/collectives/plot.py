"""Plot bus bandwidth and latency of collectives against the size, one line for each number of devices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.run.plot import legend_beside, new_figure, save_figure


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write a PNG with the bus bandwidth above and the latency below.

    Args:
      path: file to write.
      rows: `results` of `sweep.measure_collectives`.
    """
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        half = row.get("out_of_place") or row["in_place"]
        name = f"{row['operation']}, {row['dtype']}, {row['devices']} devices"
        lines.setdefault(name, []).append((row["bytes"], half["busbw"] / 1e9, half["p50"] * 1e6))
    figure = new_figure("Collectives: bus bandwidth and latency", (1.0, 1.0), (9.0, 6.5))
    bandwidth, latency = figure.axes
    for name, points in lines.items():
        sizes, busbw, micros = zip(*points, strict=True)
        bandwidth.plot(sizes, busbw, marker=".", label=name)
        latency.plot(sizes, micros, marker=".", label=name)
    bandwidth.set(ylabel="bus bandwidth (GB/s)", xscale="log", ylim=(0, None))
    latency.set(xlabel="size (bytes)", ylabel="median time (µs)", yscale="log")
    legend_beside(bandwidth)
    save_figure(figure, path)
