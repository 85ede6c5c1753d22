"""The rows of a run, read once and reduced while they are read: a row of a large model has thousands of numbers."""

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Generic, NamedTuple, TypeVar

from zaya_jax.run.files import require_regular
from zaya_jax.run.metrics import parse_row

T = TypeVar("T")

POINTS = 1000  # of a line in the page; a wide screen has about as many pixels
MAPS = 400  # columns of a heat map over the steps
FRAMES = 40  # positions of a slider
_MOST_STEPS = 2**31  # which no run can have
_MOST_SKIPS = 1000  # skipped steps that are listed
# Values of each layer, and how one line shows them.
_LAYERS = {
    "load_entropy": (("mean", fmean), ("lowest", min)),
    "max_load": (("mean", fmean), ("highest", max)),
    "skip_rate": (("mean", fmean), ("highest", max)),
    "bias_range": (("highest", max),),
}


class Skip(NamedTuple):
    """A skipped step."""

    step: int
    reason: str
    rows: str  # of the data that it read


class Line:
    """Values by step; NaN stands for a value that was not finite."""

    def __init__(self, steps: Iterable[int] = (), values: Iterable[float] = ()) -> None:
        self.steps, self.values = array("q", steps), array("d", values)

    def add(self, step: int, value: float) -> None:
        """Add the value of a step."""
        self.steps.append(step)
        self.values.append(value)

    @property
    def finite(self) -> list[float]:
        """The finite values."""
        return [value for value in self.values if math.isfinite(value)]


def scaled(line: Line, factor: float) -> Line:
    """Return a line with all values multiplied by `factor`."""
    return Line(line.steps, (value * factor for value in line.values))


class History:
    """The columns of a file of rows, over the steps."""

    def __init__(self, path: Path) -> None:
        """Read the rows of a file; none if it does not exist."""
        self.steps = array("q")  # number of the step of each row
        # By name of the metric; of those with values per layer, source or role, by '(metric, part)'.
        self.lines: dict[str | tuple[str, str], Line] = defaultdict(Line)
        self.phases: list[tuple[int, str]] = []  # first step and name of each phase
        self.skips: list[Skip] = []  # skipped steps, the first ones if there are many
        self.skipped = 0  # number of skipped steps
        self.entropy = Thinned[list[float]](MAPS)  # load entropy of each layer
        self.loads = Thinned[list[list[float]]](FRAMES)  # of each expert of each layer, over that of a uniform load
        self.problem = ""  # a sentence about a damaged row, after which nothing is read
        require_regular(path)
        if path.exists():
            with path.open("rb") as file:
                self._read(path, file)
        self.entropy.close()
        self.loads.close()
        self.lines = dict(self.lines)

    def line(self, name: str, part: str | None = None) -> Line:
        """Return the values of a metric, or of a part of it; an empty line if there are none."""
        line = self.lines.get(name if part is None else (name, part), Line())
        return line if any(map(math.isfinite, line.values)) else Line()

    def parts(self, name: str) -> list[str]:
        """List the parts of a metric that have values."""
        return [key[1] for key in self.lines if key[0] == name and not isinstance(key, str) and self.line(*key).steps]

    def last(self, name: str) -> float | None:
        """Return the last value of a metric; None if it has none."""
        return next(iter(self.line(name).finite[-1:]), None)

    def _read(self, path: Path, lines: Iterable[bytes]) -> None:
        for number, line in enumerate(lines, 1):
            row, last = parse_row(line), self.steps[-1] if self.steps else -1
            if row is None or not last < row["step"] < _MOST_STEPS:
                if line.endswith(b"\n"):
                    is_old = row is not None and 0 <= row["step"] <= last
                    why = f"has step {row['step']} after step {last}" if row and is_old else "is damaged"
                    self.problem = f"Line {number} of {path} {why}; the rows from there on are not shown."
                return  # without its end, the line is being written, or was when its writer was killed
            self._add(row)

    def _add(self, row: dict[str, Any]) -> None:
        step = row["step"]
        self.steps.append(step)
        if isinstance(phase := row.get("phase"), str) and (not self.phases or self.phases[-1][1] != phase):
            self.phases.append((step, phase))
        if "skip" in row:
            self.skipped += 1
            if len(self.skips) < _MOST_SKIPS:
                rows = row.get("rows")
                text = f"{rows[0]} to {rows[1]}" if isinstance(rows, list) and len(rows) == 2 else "–"
                self.skips.append(Skip(step, str(row["skip"]), text))
        for name, value in row.items():
            if name in _LAYERS:
                known = [number for number in _numbers(value) if math.isfinite(number)]
                for part, reduce in _LAYERS[name] if known else ():
                    self.lines[name, part].add(step, reduce(known))
                if known and name == "load_entropy":
                    self.entropy.add(step, _numbers(value))
            elif isinstance(value, dict):
                for part, inner in value.items():
                    self.lines[name, part].add(step, _number(inner))
            elif value is None or isinstance(value, int | float):
                self.lines[name].add(step, _number(value))
        layers = row.get("expert_counts")
        counts = [_numbers(layer) for layer in layers] if isinstance(layers, list) else []
        if counts and all(len(layer) > 1 and len(layer) == len(counts[0]) for layer in counts):
            self.loads.add(step, [_over_uniform(layer[:-1]) for layer in counts])


def _over_uniform(counts: list[float]) -> list[float]:
    total = sum(counts)
    return [count * len(counts) / total if total else math.nan for count in counts]


def _number(value: Any) -> float:
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan
    except OverflowError:
        return math.nan


def _numbers(values: Any) -> list[float]:
    return [_number(value) for value in values] if isinstance(values, list) else []


def thin(xs: Sequence[float], ys: Sequence[float], most: int = POINTS) -> tuple[list[float], list[float]]:
    """Return at most `most` of the points of a line, with its ends, peaks and dips.

    NaN is a gap, and stays one if the line has no value near it. `most` is at least 4.
    """
    if len(xs) <= most:
        return list(xs), list(ys)
    last, kept = len(xs) - 1, {0, len(xs) - 1}
    buckets = (most - 2) // 2
    for bucket in range(buckets):
        part = range(1 + bucket * (last - 1) // buckets, 1 + (bucket + 1) * (last - 1) // buckets)
        known = [index for index in part if not math.isnan(ys[index])]
        kept |= {min(known, key=ys.__getitem__), max(known, key=ys.__getitem__)} if known else {part[0]}
    return [xs[index] for index in sorted(kept)], [ys[index] for index in sorted(kept)]


class Thinned(Generic[T]):
    """Keeps items that are added, evenly spread: each of a few, every second, fourth, … of many."""

    def __init__(self, most: int) -> None:
        """Keep at most `most` items, and the last one; at least half as many once there are so many."""
        self.steps: list[int] = []  # of the kept items
        self.items: list[T] = []  # that are kept
        self._most, self._stride, self._count = most, 1, 0
        self._last: tuple[int, T] | None = None

    def add(self, step: int, item: T) -> None:
        """Add the item of `step`."""
        self._last = step, item
        if self._count % self._stride == 0:
            if len(self.steps) == self._most:
                del self.steps[1::2], self.items[1::2]
                self._stride *= 2
            if self._count % self._stride == 0:
                self.steps.append(step)
                self.items.append(item)
        self._count += 1

    def close(self) -> None:
        """Keep the last item, too; none follows."""
        if self._last is not None and self.steps[-1] != self._last[0]:
            self.steps.append(self._last[0])
            self.items.append(self._last[1])


def significant(value: float | None) -> float | None:
    """Round to 5 significant digits, which no plot can show more of; None if the value is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.5g}")
    return rounded if math.isfinite(rounded) else value  # of the largest floats
