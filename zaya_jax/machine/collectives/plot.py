"""Plot collectives: bandwidth and latency against the size, and bandwidth at a fixed size against the devices."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.run.plot import integer_steps, legend_beside, panels

_MARKERS = "osv^D*"  # of operations at a fixed size, whose colour would be that of another line


def draw(path: Path, result: Mapping[str, Any]) -> None:
    """Plot the result of `sweep.measure_collectives` to a PNG file.

    It shows bus bandwidth, latency, and, with several numbers of devices, their bandwidth at the largest size.
    """
    rows = result["results"]
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        half = row.get("out_of_place") or row["in_place"]
        name = f"{row['operation']}, {row['dtype']}, {row['devices']} devices"
        if row["groups"] > 1:
            name += f" along {' and '.join(row['axes'])}"
        lines.setdefault(name, []).append((row["bytes"], half["busbw"] / 1e9, half["p50"] * 1e6))
    fixed = scaling(rows)
    heights = (1.0, 1.0, 1.0) if fixed else (1.0, 1.0)
    size = (9.0, 3.3 * len(heights))
    with panels(path, "Collectives: bus bandwidth and latency", heights, size, shared=False) as stacked:
        bandwidth, latency, *others = stacked
        for name, points in lines.items():
            sizes, busbw, micros = zip(*points, strict=True)
            bandwidth.plot(sizes, busbw, marker=".", label=name)
            latency.plot(sizes, micros, marker=".", label=name)
        bandwidth.set(xlabel="size (bytes)", ylabel="bus bandwidth (GB/s)", xscale="log", ylim=(0, None))
        latency.set(xlabel="size (bytes)", ylabel="median time (µs)", xscale="log", yscale="log")
        legend_beside(bandwidth)
        for index, ((operation, dtype, size), points) in enumerate(fixed.items()):
            devices, busbw = zip(*sorted(points.items()), strict=True)
            label = f"{operation}, {dtype}, {size:,} bytes"
            others[0].plot(devices, busbw, marker=_MARKERS[index % len(_MARKERS)], color="black", label=label)
        for panel in others:
            panel.set(xlabel="devices", ylabel="bus bandwidth (GB/s)", ylim=(0, None))
            integer_steps(panel)
            legend_beside(panel)


def scaling(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str, int], dict[int, float]]:
    """Return bandwidths by number of devices, each at the largest size that all numbers of devices have."""
    found: dict[tuple[str, str, int], dict[int, float]] = {}
    counts: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        if row["groups"] > 1:  # groups along different axes may have different links
            continue
        half = row.get("out_of_place") or row["in_place"]
        found.setdefault((row["operation"], row["dtype"], row["bytes"]), {})[row["devices"]] = half["busbw"] / 1e9
        counts.setdefault((row["operation"], row["dtype"]), set()).add(row["devices"])
    largest: dict[tuple[str, str], int] = {}
    for (operation, dtype, size), points in found.items():
        every = counts[operation, dtype]
        if len(every) > 1 and points.keys() == every:
            largest[operation, dtype] = max(size, largest.get((operation, dtype), 0))
    return {(*key, size): found[*key, size] for key, size in largest.items()}
