"""The data of a run that its page shows, from the files of its folder."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard, TypeVar

from zaya_jax.aegis.events import EVENTS
from zaya_jax.aegis.report.curves import POINTS, History, Line, scaled, significant
from zaya_jax.aegis.supervision_report import AEGIS, describe_nodes
from zaya_jax.config import flatten_keys, from_dict
from zaya_jax.config.checks import counted
from zaya_jax.config.stages import total_steps
from zaya_jax.errors import InputError, as_sentence
from zaya_jax.run.checkpoints import Checkpoint
from zaya_jax.run.files import read_object, require_regular
from zaya_jax.run.folder import CONFIG, METRICS, SUMMARY, TIMINGS, read_config
from zaya_jax.run.metrics import parse_row
from zaya_jax.run.run import Run, open_run
from zaya_jax.run.status import KILLED, STOPPED, Status

T = TypeVar("T")

# What code raises whose file is damaged or may not be read.
DAMAGE = (KeyError, IndexError, TypeError, AttributeError, ValueError, ArithmeticError, OSError, RuntimeError)
_EVALUATIONS = "evaluations"  # folder in a run folder


class Warn(NamedTuple):
    """A sentence that the reader should see first; `kind` is 'failed' or 'warning'."""

    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class RunData:
    """A run that the page is about."""

    index: int  # among the runs of the page
    name: str  # different from those of the others
    path: Path  # of its folder
    config: dict[str, Any]  # its configuration, as nested dicts
    metrics: History
    timings: History
    status: Status | None  # of the process that trained it last; None if it is unknown
    summary: dict[str, Any]  # what the run wrote at its end; {} before that
    checkpoints: list[Checkpoint]  # by step, with damaged ones
    quarantined: list[str]  # names of quarantined checkpoints
    nodes: dict[str, dict[str, Any]]  # what supervisors wrote, by node; {} without them
    evaluations: list[tuple[str, dict[str, Any]]]  # records of evaluations, by file
    changes: list[dict[str, Any]]  # settings that changed when the run resumed
    problems: list[str]  # sentences about files that are damaged

    @property
    def warnings(self) -> list[Warn]:
        """The lines that a reader should see first."""
        warnings = [Warn("failed", problem) for problem in self.problems]
        if self.status is not None and self.status.state in (STOPPED, KILLED):
            text = self.status.message or f"The training process was {self.status.state} ({self.status.time})."
            warnings.append(Warn("failed", text))
        damaged = [str(each.step) for each in self.checkpoints if each.problem]
        if damaged or self.quarantined:
            names = ", ".join([*damaged, *self.quarantined])
            warnings.append(Warn("warning", f"Damaged, unreadable or quarantined checkpoints: {names}."))
        return warnings

    @property
    def boundaries(self) -> list[tuple[int, int]]:
        """The index of the run, with the last step of each phase before the last."""
        return [(self.index, step - 1) for step, _ in self.metrics.phases[1:]]

    @property
    def total_steps(self) -> int | None:
        """The number of steps that the configuration asks for; None if this version cannot read it."""
        try:
            return total_steps(from_dict(self.config))
        except InputError:
            return None

    @property
    def axes(self) -> dict[str, list[Any]]:
        """Some of the steps, with the tokens seen and the hours spent in steps up to each; {} if they are not known."""
        seen, seconds = self.metrics.line("tokens_seen"), self.timings.line("seconds")
        if not seen.steps or seen.steps != seconds.steps or not all(map(math.isfinite, seen.values)):
            return {}
        hours = accumulate(value / 3600 if math.isfinite(value) else 0.0 for value in seconds.values)
        rows = list(zip(seen.steps, seen.values, hours, strict=True))
        steps, tokens, times = zip(*rows[:: -(-len(rows) // POINTS)], rows[-1], strict=True)
        return {"step": list(steps), "tokens": list(tokens), "hours": list(map(significant, times))}

    @property
    def baselines(self) -> dict[str, float]:
        """Bits per byte of compressors on the held-out text, by name; {} before the end, and without a text corpus."""
        baselines = self.summary.get("baselines")
        items = baselines.items() if isinstance(baselines, dict) else ()
        return {name: bits for name, bits in items if isinstance(bits, float)}

    def nats_per_token(self, bits_per_byte: float) -> float | None:
        """Convert bits per byte of the held-out text; None if its bytes per token are not known."""
        texts = self.heldout.values()
        tokens, size = (sum(text[key] for text in texts) for key in ("tokens", "bytes"))
        return bits_per_byte * math.log(2) * size / tokens if tokens else None

    @property
    def heldout(self) -> dict[str, dict[str, Any]]:
        """The `tokens` and `bytes` of the held-out text of each source; {} if they are not known yet."""
        records = [record.get("heldout") for _, record in self.evaluations] + [self.summary.get("heldout_by_source")]
        return next((record for record in reversed(records) if _is_heldout(record)), {})

    @property
    def heldout_bits(self) -> dict[str, Line]:
        """The held-out loss of each source in bits per byte, by step."""
        lines = dict[str, Line]()
        for source, text in self.heldout.items():
            line = self.metrics.line("heldout_loss_by_source", source)
            if not line.steps and len(self.heldout) == 1:
                line = self.metrics.line("heldout_loss")
            if line.steps and text["bytes"]:
                lines[source] = scaled(line, text["tokens"] / text["bytes"] / math.log(2))
        return lines


def make_or(default: T, make: Callable[[RunData], T], run: RunData) -> T:
    """Return what `make` returns for a run; `default` if a damaged file prevents it."""
    try:
        return make(run)
    except DAMAGE:
        return default


def flatten_settings(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a configuration with dots, such as 'phases.train.tokens'."""
    return dict(flatten_keys({**tree, "phases": {phase["name"]: phase for phase in tree["phases"]}}))


def read_runs(paths: Sequence[str]) -> list[RunData]:
    """Read runs; `InputError` if a path is not a run folder, its configuration is damaged, or it has no steps yet."""
    runs = [open_run(path) for path in paths]
    names = _names([run.folder for run in runs])
    return [_read(run, index, name) for index, (run, name) in enumerate(zip(runs, names, strict=True))]


def _read(run: Run, index: int, name: str) -> RunData:
    folder, problems = run.folder, list[str]()
    if not (folder / CONFIG).exists():
        raise InputError(f"{folder} has no {CONFIG}, so its run cannot be identified. Name the folder of a run.")
    metrics, timings = History(folder / METRICS), History(folder / TIMINGS)
    problems += filter(None, (metrics.problem, timings.problem))
    if not metrics.steps:
        reason = f"{METRICS} is missing, empty or damaged. Train the run, or wait for its first step."
        raise InputError(f"{folder} has no steps yet: {reason}")
    config, changes, nodes = read_config(folder), list[dict[str, Any]](), dict[str, dict[str, Any]]()
    try:
        changes = run.changes
    except InputError as error:
        problems.append(str(error))
    evaluations = _read_evaluations(folder / _EVALUATIONS, problems)
    try:
        nodes = describe_nodes(folder)
    except DAMAGE:
        problems.append(f"The supervisor's files in {folder / AEGIS} are damaged; goodput and faults are not shown.")
    for node, each in nodes.items():
        if unread := each["unread_events"]:
            path = folder / AEGIS / node / EVENTS
            problems.append(f"{path}: {counted(unread, 'line')} left out, damaged or of another version.")
    quarantined, summary = [path.name for path in run.quarantined], _object(folder / SUMMARY, problems)
    files = run.status, summary, run.checkpoints, quarantined
    return RunData(index, name, folder, config, metrics, timings, *files, nodes, evaluations, changes, problems)


def _read_evaluations(folder: Path, problems: list[str]) -> list[tuple[str, dict[str, Any]]]:
    """Read the records of all files of evaluations, by step."""
    evaluations = list[tuple[str, dict[str, Any]]]()
    for path in sorted(folder.glob("*.json*")):
        try:
            if path.suffix == ".jsonl":
                require_regular(path)
                records = [parse_row(line) for line in path.read_bytes().splitlines(keepends=True)]
            else:
                records = [_object(path, [])]
        except (OSError, InputError) as error:
            problems.append(as_sentence(error))
            continue
        evaluations += [(path.name, record) for record in records if record]
        if not any(records):
            problems.append(f"{path} is damaged; its evaluation is not shown.")
    return sorted(evaluations, key=lambda named: step if isinstance(step := named[1].get("step"), int) else 0)


def _object(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        return read_object(path) if path.exists() else {}
    except InputError as error:
        problems.append(str(error))
        return {}


def _is_heldout(record: Any) -> TypeGuard[dict[str, dict[str, Any]]]:
    texts = list(record.values()) if isinstance(record, dict) else []
    sizes = [text.get(key) if isinstance(text, dict) else None for text in texts for key in ("tokens", "bytes")]
    return len(sizes) > 0 and all(isinstance(size, int) for size in sizes)


def _names(folders: Sequence[Path]) -> list[str]:
    """Name each run by its folder, with as many of the folders above as tell it from the others."""
    parts = [folder.resolve().parts for folder in folders]
    if len(set(parts)) < len(parts):
        raise InputError("A run is named twice. Name each run once.")
    depth = next(depth for depth in range(1, 1000) if len({each[-depth:] for each in parts}) == len(parts))
    return ["/".join(each[-depth:]) for each in parts]
