"""Plot collectives: bandwidth and latency against the size."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zaya_jax.run.plot import legend_beside, panels


def draw(path: Path, result: Mapping[str, Any]) -> None:
    """Plot bus bandwidth and latency of the result of `sweep.measure_collectives` to a PNG file."""
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
