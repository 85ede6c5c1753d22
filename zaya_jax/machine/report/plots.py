"""The plots of a result, as the verbs draw them."""

import base64
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.machine.report.results import Result


class Plot(NamedTuple):
    """A plot.

    Attributes:
      alt: what it shows, for readers who do not see it.
      uri: the PNG file, as a data URI.
    """

    alt: str
    uri: str


def draw_plots(result: Result) -> list[Plot]:
    """Draw the plots of a result."""
    if result.verb not in _DRAW:
        return []
    with tempfile.TemporaryDirectory(prefix="zaya_jax_") as folder:
        path = Path(folder) / "plot.png"
        alt = _DRAW[result.verb](path, result.content)
        return [Plot(f"{alt} The tables have the values.", _uri(path))] if path.exists() else []


def _uri(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _memory(path: Path, content: dict[str, Any]) -> str:
    from zaya_jax.machine.memory.sweep import draw

    draw(path, content["results"])
    return "Bandwidth of each operation against the size of an array."


def _gemm(path: Path, content: dict[str, Any]) -> str:
    from zaya_jax.machine.gemm.plot import draw

    if content["maximum"]:
        draw(path, [row for row in content["results"] if "failed" not in row], content["maximum"])
    return "Speed of squares against their size, and the share of the fastest one that other products reach."


def _collectives(path: Path, content: dict[str, Any]) -> str:
    from zaya_jax.machine.collectives.plot import draw

    draw(path, content["results"])
    return "Bus bandwidth and median time of each collective against the size."


def _step(path: Path, content: dict[str, Any]) -> str:
    from zaya_jax.machine.breakdown.plot import draw

    draw(path, content)
    return f"Time of a {content['what']} by part, as a stacked bar."


def _context(path: Path, content: dict[str, Any]) -> str:
    from zaya_jax.machine import context

    longest = max(row["length"] for row in content["results"])
    needs = {context.Case(row["attention"], row["devices"], longest): row["bytes_per_device"]
             for row in content["results"] if row["length"] == longest}  # fmt: skip
    context.draw(path, longest, context.memory_curves(needs))
    return f"Memory per device of attention over {longest:,} tokens against the number of devices."


_DRAW = {"memory": _memory, "gemm": _gemm, "collectives": _collectives, "step": _step, "context": _context}
