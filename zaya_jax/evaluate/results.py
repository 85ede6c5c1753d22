"""Results of an evaluation: what is recorded, the table, and the file."""

import hashlib
import json
import math
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zaya_jax.errors import InputError, printable
from zaya_jax.evaluate.heldout import HeldoutLoss
from zaya_jax.evaluate.scoring import Progress
from zaya_jax.run.files import explained, require_regular, write_atomically
from zaya_jax.run.metrics import finite
from zaya_jax.run.table import format_table
from zaya_jax.run.writing import make_folder, resolved

FOLDER = "evaluations"  # in a run folder
_LONGEST_NAME = 100  # characters of the tasks' names
_EVERY = 30.0  # seconds between lines of progress without a terminal


def text_record(loss: HeldoutLoss, text_bytes: int, lost_bytes: int = 0) -> dict[str, Any]:
    """Return the scores of a text as JSON; its tokens stand for `text_bytes`, and `lost_bytes` have none."""
    scores = {"nats_per_token": loss.nats_per_token, "perplexity": math.exp(min(loss.nats_per_token, 700.0))}
    sizes = {"tokens": loss.tokens, "bytes": text_bytes, "lost_bytes": lost_bytes}
    return {**scores, "bits_per_byte": loss.bits_per_byte(text_bytes), **sizes}


_FORMATS = {"nats_per_token": ".4f", "perplexity": ".2f", "bits_per_byte": ".4f", "tokens": ",", "bytes": ","}


def text_table(records: Mapping[str, Mapping[str, Any]]) -> str:
    """Format `text_record`s by name."""
    lines = [["text", "nats/token", "perplexity", "bits/byte", "tokens", "bytes"]]
    lines += [
        [printable(name), *(format(row[key], kind) for key, kind in _FORMATS.items())] for name, row in records.items()
    ]
    remark = "more bytes have no token in the tokenizer, and do not count"
    remarks = [f"{name}: {row['lost_bytes']:,} {remark}" for name, row in records.items() if row["lost_bytes"]]
    return "\n".join([*format_table(lines), *remarks])


def task_table(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the results of `harness.score_tasks` by model, side by side."""
    rows: dict[tuple[str, str], dict[str, str]] = {}  # by task and metric: cells by head
    for model, tasks in models.items():
        for task, result in tasks.items():
            for metric, value in result["metrics"].items():
                samples = f" avg@{result['samples']}" if result.get("samples", 1) > 1 else ""
                first = {"version": result.get("version"), "few-shot": result.get("fewshot")}
                row = {name: "" if each is None else str(each) for name, each in first.items()}
                row |= {"task": task, "metric": metric.removesuffix(",none") + samples}
                error = value.get("stderr")
                cell = f"{value['value']:.4f}" + (f" ± {error:.4f}" if isinstance(error, float) else "")
                rows.setdefault((task, metric), row)[f"model {model}"] = cell
    heads = ["task", "version", "few-shot", "metric"]
    cells = [
        [*(row[head] for head in heads), *(row.get(f"model {model}", "-") for model in models)] for row in rows.values()
    ]
    return "\n".join(format_table([[*heads, *models], *cells]))


def evaluation_name(scored: Sequence[str], settings: Mapping[str, Any]) -> str:
    """Return the NAME of an evaluation in `RUN_DIR/evaluations/`, from what is scored; [] for the held-out data.

    It ends with a digest of all settings that change a score: with others, no file is replaced or counts as done.
    """
    if not scored:
        return "heldout"
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.+-]', '_', '+'.join(scored))[:_LONGEST_NAME]}-{digest}"


def write_record(path: Path, record: Mapping[str, Any]) -> None:
    """Write a record as JSON; InputError if the file cannot be written."""
    with explained(f"{path} cannot be written"):
        require_regular(path)
        make_folder(path.parent)
        write_atomically(resolved(path), json.dumps(finite(dict(record)), indent=1, allow_nan=False) + "\n")


def check_writable(path: Path) -> None:
    """Raise `InputError` if a file cannot be written there, before hours of work."""
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK) or not folder.is_dir():
        raise InputError(f"The scores cannot be written to {path}; name a file in a folder that can be with --output.")


def report_progress(label: str, show: bool = True) -> Progress:
    """Make a callback that prints progress on stderr: one line on a terminal, else a line every half minute."""
    started = last = time.monotonic()
    terminal = sys.stderr.isatty()

    def report(done: int, total: int) -> None:
        nonlocal last
        now = time.monotonic()
        if not show or (done < total and now - last < (0.5 if terminal else _EVERY)):
            return
        last = now
        left = f", {(total - done) * (now - started) / max(done, 1):.0f} s left" if done < total else ""
        end = "\r" if terminal and done < total else "\n"
        print(f"{label}: {done:,} of {total:,}{left}".ljust(60), end=end, file=sys.stderr, flush=True)

    return report
