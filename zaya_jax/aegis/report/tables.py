"""Tables of the page."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zaya_jax.aegis.report.run_data import RunData, make_or
from zaya_jax.config.checks import counted, list_counts
from zaya_jax.run.table import NONE, Cell, Row, Table, make_table, number, percent, quantity

_MOST = 200  # rows of a table
_PARAMS = "params."  # how the names of parameters start in a checkpoint


def overview(runs: Sequence[RunData]) -> Table:
    """Say how the runs went, in one table."""
    rows = [[label, *(make_or(NONE, cell, run) for run in runs)] for label, cell in _OVERVIEW.items()]
    return Table("", ["", *(run.name for run in runs)], [row for row in rows if set(row[1:]) != {NONE}])


def _state(run: RunData) -> str:
    status = run.status
    if status is None:
        return NONE
    return f"{status.state}, {status.time}" if status.state != "running" else f"running since {status.time}"


def _steps(run: RunData) -> str:
    last, planned = run.metrics.steps[-1], run.total_steps
    return f"{last:,}" if planned is None else f"{last:,} of {planned:,}"


def _heldout(run: RunData) -> str:
    line = run.metrics.line("heldout_loss")
    known = [(value, step) for step, value in zip(line.steps, line.values, strict=True) if math.isfinite(value)]
    if not known:
        return NONE
    (last, step), (best, at) = known[-1], min(known)
    lowest = "" if best == last else f"; lowest {best:.4f}, after step {at:,}"
    return f"{last:.4f} after step {step:,}{lowest}"


def _bits(run: RunData) -> str:
    lines = run.heldout_bits
    return (
        ", ".join(f"{line.values[-1]:.4f}{f' ({name})' if len(lines) > 1 else ''}" for name, line in lines.items())
        or NONE
    )


def _compressors(run: RunData) -> str:
    return (
        ", ".join(
            f"{name.replace('_given_train', ' after the training text')} {bits:.4f}"
            for name, bits in sorted(run.baselines.items())
        )
        or NONE
    )


def _training_loss(run: RunData) -> str:
    values = [value for value in run.metrics.line("loss").values if math.isfinite(value)]
    recent = values[-max(len(values) // 50, 1) :]
    return f"{sum(recent) / len(recent):.4f} (mean of {counted(len(recent), 'step')})" if recent else NONE


def _time(run: RunData) -> str:
    seconds = sum(value for value in run.timings.line("seconds").values if math.isfinite(value))
    return duration(seconds) if seconds else NONE


def _whole(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _mean(run: RunData, name: str) -> float | None:
    """Return the mean over the time of the steps."""
    seconds, line = run.timings.line("seconds"), run.timings.line(name)
    pairs = [
        (weight, value)
        for weight, value in zip(seconds.values, line.values, strict=False)
        if math.isfinite(weight) and math.isfinite(value)
    ]
    total = sum(weight for weight, _ in pairs)
    return sum(weight * value for weight, value in pairs) / total if total else None


def _skipped(run: RunData) -> str:
    reasons = Counter(skip.reason for skip in run.metrics.skips)
    listed = ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
    return f"{run.metrics.skipped:,}" + (f" ({listed})" if listed else "")


def _goodput(run: RunData) -> str:
    total = sum(node["goodput"]["seconds"] for node in run.nodes.values())
    productive = sum(node["goodput"]["fraction"] * node["goodput"]["seconds"] for node in run.nodes.values())
    if not run.nodes:
        return "not supervised"
    nodes = f" on {len(run.nodes)} nodes" if len(run.nodes) > 1 else ""
    return f"{percent(productive / total if total else 0.0)} of {duration(total)}{nodes}"


def _faults(run: RunData) -> str:
    if not run.nodes:
        return NONE
    attempts = max(node["goodput"]["attempts"] for node in run.nodes.values())
    return f"{sum(len(node['faults']) for node in run.nodes.values())}, in {counted(attempts, 'attempt')}"


def _checkpoints(run: RunData) -> str:
    usable = [checkpoint.step for checkpoint in run.checkpoints if checkpoint.is_usable]
    damaged = sum(bool(checkpoint.problem) for checkpoint in run.checkpoints)
    parts = [f"{len(usable)}, newest of step {usable[-1]:,}" if usable else "0"]
    parts += [f"{damaged} damaged or unreadable"] if damaged else []
    return ", ".join(parts + ([f"{len(run.quarantined)} quarantined"] if run.quarantined else []))


def _parameters(run: RunData) -> str:
    manifest = next((checkpoint.manifest for checkpoint in reversed(run.checkpoints) if checkpoint.manifest), None)
    shapes = [leaf["shape"] for name, leaf in (manifest.leaves if manifest else {}).items() if name.startswith(_PARAMS)]
    return f"{sum(map(math.prod, shapes)):,}{' in adapters' if run.config.get('lora') else ''}" if shapes else NONE


def _devices(run: RunData) -> str:
    environment = next(
        (
            checkpoint.manifest.metadata.get("environment", {})
            for checkpoint in reversed(run.checkpoints)
            if checkpoint.manifest
        ),
        {},
    )
    if "device" not in environment:
        return NONE
    count = f"{environment['devices']} × " if "devices" in environment else ""
    details = [
        environment[key] if key == "cpu" else counted(environment[key], "CPU")
        for key in ("cpu", "cpus")
        if environment.get("platform") == "cpu" and environment.get(key)
    ]
    cpu = f" ({', '.join(details)})" if details else ""
    version = f", jax {environment['jax']}" if "jax" in environment else ""
    return f"{count}{environment['device']}{cpu}{version}"


_OVERVIEW: Mapping[str, Callable[[RunData], str]] = {
    "state": _state,
    "held-out loss (nats/token)": _heldout,
    "held-out loss (bits/byte)": _bits,
    "compressors (bits/byte)": _compressors,
    "training loss (nats/token)": _training_loss,
    "steps": _steps,
    "tokens, with padding": lambda run: _whole(run.metrics.last("tokens_seen")),
    "time in steps": _time,
    "tokens/s": lambda run: _whole(_mean(run, "tokens_per_second")),
    "MFU": lambda run: percent(_mean(run, "mfu")),
    "goodput": _goodput,
    "faults": _faults,
    "skipped steps": _skipped,
    "checkpoints": _checkpoints,
    "parameters": _parameters,
    "devices": _devices,
}


def skipped_steps(run: RunData) -> Table:
    """List the skipped steps."""
    rows = [[f"{skip.step:,}", skip.reason, skip.rows] for skip in run.metrics.skips[:_MOST]]
    skipped = run.metrics.skipped
    more = (f"This table shows the first {_MOST} of {skipped:,}.",) if skipped > len(rows) else ()
    return Table("Skipped steps", ["step", "reason", "rows of the data"], rows, more)


def checkpoints(run: RunData) -> Table:
    """List the checkpoints."""

    def notes(row: Row) -> str:
        if row["problem"]:
            return row["problem"]
        flags = {"verified": row["is_verified"], "pinned": row["is_pinned"], "superseded": row["is_superseded"]}
        return ", ".join(name for name, holds in flags.items() if holds) or NONE

    kept = [checkpoint._asdict() for checkpoint in run.checkpoints[-_MOST:]]
    remarks = [f"Quarantined: {', '.join(run.quarantined)}."] if run.quarantined else []
    if len(run.checkpoints) > _MOST:
        remarks.append(f"This table shows the last {_MOST} of {len(run.checkpoints):,}.")
    return make_table(
        "Checkpoints",
        kept,
        {
            "step": "step",
            "phase": "phase",
            "tokens": "tokens",
            "held-out (nats/token)": lambda row: NONE if row["heldout_loss"] is None else f"{row['heldout_loss']:.4f}",
            "size (MB)": quantity("size", unit=1e6),
            "notes": notes,
        },
        *remarks,
    )


def faults(run: RunData) -> list[Table]:
    """List the faults that supervisors saw, and how each supervisor ended."""
    rows = [{"node": name, **fault} for name, node in run.nodes.items() for fault in node["faults"]]
    ends = [{"node": name, **node["verdict"]} for name, node in run.nodes.items() if node["verdict"]]
    return [
        make_table(
            "Faults",
            rows[:_MOST],
            {
                "time": "time",
                "node": "node",
                "class": _text("fault"),
                "fault": _text("code"),
                "process": _text("rank"),
                "after step": _text("step"),
                "action": _text("action"),
                "detected after (s)": quantity("detect_seconds", unit=1.0),
                "next step after (s)": quantity("recover_seconds", unit=1.0),
                "evidence": _text("text"),
            },
            *([f"This table shows the first {_MOST} of {len(rows):,}."] if len(rows) > _MOST else []),
        ),
        make_table(
            "How the supervisors ended",
            ends,
            {
                "node": "node",
                "exit code": _text("exit_code"),
                "meaning": _text("meaning"),
                "reason": _text("why"),
            },
        ),
    ]


def data(run: RunData) -> Table:
    """List what of each source the run used, and what it left out."""
    rows, remarks = list[dict[str, Any]](), list[str]()
    for name, source in _items(run.summary.get("data")):
        for split, use in (("training", source["train"]), ("held-out", source["heldout"])):
            rows.append(use | {"source": name, "split": split})
        for key, what in (("refused", "documents that the preparation refused"), ("unread_files", "files not read")):
            if counts := source.get(key):  # older summaries have no `unread_files`
                remarks.append(f"{name}: {what}: {list_counts(counts)}.")
    return make_table(
        "Documents of each source",
        rows[:_MOST],
        {
            "source": "source",
            "split": "split",
            "documents": "documents",
            "used": "used",
            "too long": "too_long",
            "a single token": "too_short",
            "never read": "unread",
            "trimmed": "trimmed",
            "bytes": "bytes",
            "bytes without a token": "lost_bytes",
        },
        *remarks,
    )


def evaluations(run: RunData) -> list[Table]:
    """List the evaluations of a run's checkpoints: of texts, and of tasks."""
    texts, tasks = list[dict[str, Any]](), list[dict[str, Any]]()
    for file, record in run.evaluations:
        origin = {"step": record.get("step"), "file": file}
        for kind in ("heldout", "texts"):
            texts += [origin | {"name": name} | text for name, text in _items(record.get(kind))]
        tasks += [
            origin | {"name": task, "metric": metric.removesuffix(",none")} | value
            for task, result in _items(record.get("tasks"))
            for metric, value in _items(result.get("metrics"))
        ]
    return [
        make_table(
            "Evaluations of texts",
            texts[:_MOST],
            {
                "step": _text("step"),
                "text": "name",
                "nats/token": _digits("nats_per_token"),
                "perplexity": quantity("perplexity", unit=1.0),
                "bits/byte": _digits("bits_per_byte"),
                "tokens": _text("tokens"),
                "bytes": _text("bytes"),
                "file": "file",
            },
        ),
        make_table(
            "Evaluations of tasks",
            tasks[:_MOST],
            {
                "step": _text("step"),
                "task": "name",
                "metric": "metric",
                "score": _digits("value"),
                "standard error": _digits("stderr"),
                "file": "file",
            },
        ),
    ]


def _text(key: str) -> Cell:
    """Return a cell that shows the value at `key`, whatever it is; '–' if there is none."""

    def cell(row: Row) -> str:
        value = row.get(key)
        return NONE if value is None else f"{value:,}" if isinstance(value, int) else str(value)

    return cell


def _digits(key: str) -> Cell:
    """Return a cell with four decimals; '–' if there is no number."""
    return lambda row: f"{row[key]:.4f}" if isinstance(row.get(key), int | float) else NONE


def _items(tree: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(name, item) for name, item in tree.items() if isinstance(item, dict)] if isinstance(tree, dict) else []


def duration(seconds: float) -> str:
    """Format a duration: '12.3 s', '4 min 20 s' or '1 h 02 min'."""
    if seconds < 60:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"
