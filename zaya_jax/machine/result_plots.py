"""The plot of a result, by the verb that wrote it."""

from pathlib import Path
from typing import Any

from zaya_jax.machine import context
from zaya_jax.machine.breakdown import plot as step
from zaya_jax.machine.collectives import plot as collectives
from zaya_jax.machine.gemm import plot as gemm
from zaya_jax.machine.memory import sweep as memory
from zaya_jax.machine.sizing import plot as sizing

# The function that plots a result, and what its plot shows, for readers who do not see it.
_PLOTS = {
    "memory": (memory.draw, "Bandwidth of each operation against the size of an array."),
    "gemm": (gemm.draw, "Speed of squares against their size, and the share of the fastest one that other products "
             "reach."),
    "collectives": (collectives.draw, "Bus bandwidth and median time of each collective against the size."),
    "step": (step.draw, "Time of a {what} by part, as a stacked bar."),
    "context": (context.draw, "Memory per device of attention over {longest:,} tokens against the number of devices."),
    "sizing": (sizing.draw, "Training throughput against decode latency."),
}  # fmt: skip


def draw(verb: str, path: Path, result: dict[str, Any]) -> str:
    """Plot a result to a PNG file, if its verb has a plot; returns what the plot shows."""
    if verb not in _PLOTS:
        return ""
    plot, shows = _PLOTS[verb]
    plot(path, result)
    longest = max((row.get("length", 0) for row in result.get("results", ())), default=0)
    return shows.format(what=result.get("what"), longest=longest)
