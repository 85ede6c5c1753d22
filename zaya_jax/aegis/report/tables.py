"""Tables of the page."""

import contextlib
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.aegis.report.run_data import DAMAGE, RunData, flatten_settings
from zaya_jax.config import load_config, to_dict
from zaya_jax.config.checks import counted, list_counts, shown
from zaya_jax.config.weight_source import HF
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.folder import CONFIG, read_config
from zaya_jax.run.table import NONE, Cell, Row, Table, make_table, number, percent, quantity, same

_MOST = 200  # rows of a table
Facts = Iterator[tuple[str, str]]  # label and text


def overview(runs: Sequence[RunData]) -> Table:
    """Say how the runs went, in one table."""
    facts = [dict(_facts(run)) for run in runs]
    labels = dict.fromkeys(label for each in facts for label in each)
    rows = [[label, *(each.get(label, NONE) for each in facts)] for label in labels]
    return Table("", ["", *(run.name for run in runs)], [row for row in rows if set(row[1:]) != {NONE}])


def _facts(run: RunData) -> Facts:
    """Yield what can be said; damage in one file costs what is made of it."""
    for facts in (_state, _losses, _training_loss, _speed, _supervision, _skipped, _checkpoints, _model):
        with contextlib.suppress(*DAMAGE):
            yield from facts(run)


def _state(run: RunData) -> Facts:
    state, time, message = (NONE, "", "") if (found := run.status) is None else (found.state, found.time, found.message)
    note = message if state == "finished" else ""  # of others it is a warning
    yield "state", f"running since {time}" if state == "running" else ", ".join(filter(None, (state, time, note)))


def _losses(run: RunData) -> Facts:
    line, heldout = run.metrics.line("heldout_loss"), NONE
    known = [(value, step) for step, value in zip(line.steps, line.values, strict=True) if math.isfinite(value)]
    if known:
        (last, step), (best, at) = known[-1], min(known)
        lowest = "" if best == last else f"; lowest {best:.4f}, after step {at:,}"
        heldout = f"{last:.4f} after step {step:,}{lowest}"
    yield "held-out loss (nats/token)", heldout
    bits = run.heldout_bits
    names = {name: f" ({name})" if len(bits) > 1 else "" for name in bits}
    yield "held-out loss (bits/byte)", ", ".join(f"{bits[name].values[-1]:.4f}{names[name]}" for name in bits) or NONE
    compressed = ", ".join(f"{name} {bits:.4f}" for name, bits in sorted(run.baselines.items())) or NONE
    yield "compressors (bits/byte)", compressed.replace("_given_train", " after the training text")


def _training_loss(run: RunData) -> Facts:
    values = run.metrics.line("loss").finite
    recent = values[-max(len(values) // 50, 1) :] or [math.nan]
    mean = f"{sum(recent) / len(recent):.4f} (mean of {counted(len(recent), 'step')})"
    yield "training loss (nats/token)", mean if values else NONE


def _speed(run: RunData) -> Facts:
    last, planned = run.metrics.steps[-1], run.total_steps
    yield "steps", f"{last:,}" if planned is None else f"{last:,} of {planned:,}"
    yield "tokens, with padding", _whole(run.metrics.last("tokens_seen"))
    seconds = sum(run.timings.line("seconds").finite)
    yield "time in steps", duration(seconds) if seconds else NONE
    yield "tokens/s", _whole(_mean(run, "tokens_per_second"))
    yield "MFU", percent(_mean(run, "mfu"))


def _whole(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def _mean(run: RunData, name: str) -> float | None:
    pairs = zip(run.timings.line("seconds").values, run.timings.line(name).values, strict=False)
    known = [pair for pair in pairs if all(map(math.isfinite, pair))]
    total = sum(seconds for seconds, _ in known)
    return sum(seconds * value for seconds, value in known) / total if total else None


def _supervision(run: RunData) -> Facts:
    nodes = [node["goodput"] for node in run.nodes.values()]
    if not nodes:
        yield from (("goodput", "not supervised"), ("faults", NONE))
        return
    total = sum(node["seconds"] for node in nodes)
    productive = sum(node["fraction"] * node["seconds"] for node in nodes)
    on = f" on {len(nodes)} nodes" if len(nodes) > 1 else ""
    yield "goodput", f"{percent(productive / total if total else 0.0)} of {duration(total)}{on}"
    faults, attempts = sum(len(node["faults"]) for node in run.nodes.values()), max(node["attempts"] for node in nodes)
    yield "faults", f"{faults}, in {counted(attempts, 'attempt')}"


def _skipped(run: RunData) -> Facts:
    reasons = Counter(skip.reason for skip in run.metrics.skips)
    listed = ", ".join(f"{count} × {reason}" for reason, count in reasons.most_common())
    yield "skipped steps", f"{run.metrics.skipped:,}" + (f" ({listed})" if listed else "")


def _checkpoints(run: RunData) -> Facts:
    usable = [checkpoint.step for checkpoint in run.checkpoints if checkpoint.is_usable]
    damaged, quarantined = sum(bool(checkpoint.problem) for checkpoint in run.checkpoints), len(run.quarantined)
    parts = [f"{len(usable)}, newest of step {usable[-1]:,}" if usable else "0"]
    parts += [f"{damaged} damaged or unreadable"] if damaged else []
    yield "checkpoints", ", ".join([*parts, f"{quarantined} quarantined"] if quarantined else parts)


def _model(run: RunData) -> Facts:
    manifest = next((checkpoint.manifest for checkpoint in reversed(run.checkpoints) if checkpoint.manifest), None)
    leaves, environment = (manifest.leaves, manifest.metadata.get("environment", {})) if manifest else ({}, {})
    shapes = [leaf["shape"] for name, leaf in leaves.items() if name.startswith("params.")]
    size = f"{sum(map(math.prod, shapes)):,}{' in adapters' if run.config.get('lora') else ''}"
    yield "parameters", size if shapes else NONE
    count = f"{environment['devices']} × " if "devices" in environment else ""
    host = environment if environment.get("platform") == "cpu" else {}
    details = [host.get("cpu"), counted(host["cpus"], "CPU") if host.get("cpus") else None]
    cpu = f" ({', '.join(filter(None, details))})" if any(details) else ""
    version = f", jax {environment['jax']}" if "jax" in environment else ""
    yield "devices", f"{count}{environment['device']}{cpu}{version}" if "device" in environment else NONE


def skipped_steps(run: RunData) -> Table:
    """List the skipped steps."""
    rows = [[f"{skip.step:,}", skip.reason, skip.rows] for skip in run.metrics.skips[:_MOST]]
    skipped = run.metrics.skipped
    more = (f"This table shows the first {_MOST} of {skipped:,}.",) if skipped > len(rows) else ()
    return Table("Skipped steps", ["step", "reason", "rows of the data"], rows, more)


def checkpoints(run: RunData) -> Table:
    """List the checkpoints."""

    def notes(row: Row) -> str:
        flags = [name for name in ("verified", "pinned", "superseded") if row[f"is_{name}"]]
        return row["problem"] or ", ".join(flags) or NONE

    size, heldout = quantity("size", unit=1e6), _digits("heldout_loss")
    columns = same("step", "phase", "tokens") | {"held-out (nats/token)": heldout, "size (MB)": size, "notes": notes}
    remarks = [f"Quarantined: {', '.join(run.quarantined)}."] if run.quarantined else []
    if len(run.checkpoints) > _MOST:
        remarks.append(f"This table shows the last {_MOST} of {len(run.checkpoints):,}.")
    kept = [checkpoint._asdict() for checkpoint in run.checkpoints[-_MOST:]]
    return _table("Checkpoints", kept, columns, *remarks)


def faults(run: RunData) -> list[Table]:
    """List the faults that supervisors saw, and how each supervisor ended."""
    rows = [{"node": name, **fault} for name, node in run.nodes.items() for fault in node["faults"]]
    ends = [{"node": name, **node["verdict"]} for name, node in run.nodes.items() if node["verdict"]]
    columns = {**same("time", "node"), "class": "fault", "fault": "code", "process": "rank", "after step": "step"}
    columns |= {"action": "action", "detected after (s)": quantity("detect_seconds", unit=1.0)}
    columns |= {"next step after (s)": quantity("recover_seconds", unit=1.0), "evidence": "text"}
    verdict = {"node": "node", "exit code": "exit_code", "meaning": "meaning", "reason": "why"}
    return [_table("Faults", rows, columns), _table("How the supervisors ended", ends, verdict)]


def data(run: RunData) -> Table:
    """List what of each source the run used, and what it left out."""
    rows, remarks = list[dict[str, Any]](), list[str]()
    for name, source in _items(run.summary.get("data")):
        for split, use in (("training", source["train"]), ("held-out", source["heldout"])):
            rows.append(use | {"source": name, "split": split})
        for key, what in (("refused", "documents that the preparation refused"), ("unread_files", "files not read")):
            if counts := source.get(key):  # older summaries have no `unread_files`
                remarks.append(f"{name}: {what}: {list_counts(counts)}.")
    unused = {"too long": "too_long", "a single token": "too_short", "never read": "unread", "trimmed": "trimmed"}
    sizes = {"bytes": "bytes", "bytes without a token": "lost_bytes"}
    columns = same("source", "split", "documents", "used") | unused | sizes
    return _table("Documents of each source", rows, columns, *remarks)


def evaluations(run: RunData) -> list[Table]:
    """List the evaluations of a run's checkpoints: of texts, and of tasks."""
    texts, tasks = list[dict[str, Any]](), list[dict[str, Any]]()
    for file, record in run.evaluations:
        origin = {"step": record.get("step"), "file": file}
        for kind in ("heldout", "texts"):
            texts += [origin | {"name": name} | text for name, text in _items(record.get(kind))]
        for task, result in _items(record.get("tasks")):
            for metric, value in _items(result.get("metrics")):
                tasks.append(origin | {"name": task, "metric": metric.removesuffix(",none")} | value)
    perplexity, nats, bits = quantity("perplexity", unit=1.0), _digits("nats_per_token"), _digits("bits_per_byte")
    losses = {"nats/token": nats, "perplexity": perplexity, "bits/byte": bits}
    text_columns = {"step": "step", "text": "name", **losses, **same("tokens", "bytes", "file")}
    scores = {"score": _digits("value"), "standard error": _digits("stderr"), "file": "file"}
    task_columns = {"step": "step", "task": "name", "metric": "metric", **scores}
    return [_table("Evaluations of texts", texts, text_columns), _table("Evaluations of tasks", tasks, task_columns)]


def _table(title: str, rows: Sequence[Row], columns: Mapping[str, str | Cell], *remarks: str) -> Table:
    more = [f"This table shows the first {_MOST} of {len(rows):,}."] if len(rows) > _MOST else []
    return make_table(title, rows[:_MOST], columns, *remarks, *more)


def _digits(key: str) -> Cell:
    return lambda row: f"{row[key]:.4f}" if isinstance(row.get(key), int | float) else NONE


def _items(tree: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(name, item) for name, item in tree.items() if isinstance(item, dict)] if isinstance(tree, dict) else []


def duration(seconds: float) -> str:
    """Format a duration: '12.3 s', '4 min 20 s' or '1 h 02 min'."""
    if seconds < 60:
        return f"{number(seconds)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60:,} h {minutes % 60:02d} min"


def between_runs(runs: Sequence[RunData]) -> Table:
    """List the settings in which runs differ."""
    return _differences("Settings that differ between the runs", _by_name(runs))


def from_parents(run: RunData) -> Iterator[Table]:
    """List the settings in which a run differs from those whose weights it started from."""
    for key in ("resume_from", "init_from"):
        source = run.config.get(key)
        if not isinstance(source, str):
            continue
        title, why = f"Differences from {key}={source}", f"{source} has no {CONFIG}, so its settings are unknown."
        try:
            if (parent := _run_folder(source)) is not None:
                settings = {source: flatten_settings(read_config(parent)), run.name: flatten_settings(run.config)}
                yield _differences(title, settings)
                continue
        except InputError as error:
            why = str(error)
        why = "A transformers folder has no training settings." if source.startswith(HF) else why
        yield Table(title, [], [], (why,))


def from_file(runs: Sequence[RunData], path: str) -> Table:
    """List the settings in which runs differ from a configuration file; InputError if it is invalid."""
    settings = flatten_settings(to_dict(load_config(path)))
    return _differences(f"Differences from {path}", {path: settings} | _by_name(runs))


def changes(run: RunData) -> Table:
    """List the settings that changed when a run resumed."""
    rows = list[list[str]]()
    for change in run.changes:
        rows += [[f"{change['step']:,}", key, shown(old), shown(new)] for key, (old, new) in change["changes"].items()]
    return Table("Settings that changed on resuming", ["after step", "key", "old", "new"], rows)


def _differences(title: str, settings: Mapping[str, Mapping[str, Any]]) -> Table:
    keys = dict.fromkeys(key for each in settings.values() for key in each)
    texts = {key: [shown(each[key]) if key in each else NONE for each in settings.values()] for key in keys}
    rows = [[key, *values] for key, values in texts.items() if len(set(values)) > 1]
    return Table(title, ["key", *settings], rows, () if rows else ("No settings differ.",))


def _by_name(runs: Sequence[RunData]) -> dict[str, dict[str, Any]]:
    return {run.name: flatten_settings(run.config) for run in runs}


def _run_folder(source: str) -> Path | None:
    """Return the run folder in RUN_DIR, RUN_DIR@PHASE or RUN_DIR/checkpoints/STEP; None if it is not there."""
    for text in (source, source.rpartition("@")[0]):
        folder = Path(os.path.expanduser(text))
        folder = folder.parent.parent if folder.parent.name == CHECKPOINTS else folder
        if text and os.path.exists(folder / CONFIG):  # unlike Path.exists, never raises
            return folder
    return None
