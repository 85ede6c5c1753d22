"""The account of a run's data: how many documents of each source are used, and what is left out, and why."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import numpy as np

from zaya_jax.config import Config
from zaya_jax.config.checks import counted, list_counts
from zaya_jax.data.loading.batches import heldout_text
from zaya_jax.data.loading.document_parts import Tally, Use
from zaya_jax.data.loading.run_plan import RunPlan
from zaya_jax.data.loading.sources import Prepared
from zaya_jax.data.prepare.manifest import SPLITS, SplitEntry

ROWS = 1000  # that are searched for a token in the loss; usually, the first one has some

# What of a split is left out, and what a person reads: of training, then of evaluation.
_REASONS = {
    "too_long": "longer than a row (raise context, or change over_length)",
    "too_short": "of a single token, which predicts nothing",
    "unread": "never sampled, since the run ends first",
}


def account(config: Config, prepared: Prepared, plan: RunPlan) -> dict[str, dict[str, Any]]:
    """Return the account as JSON: what was read equals what is used plus what is left out.

    By source: `refused`, number of documents that the preparation skipped, by reason; `unread_files`, number of items
    of its folders that were not read, by kind; `phases`, those that train on the source; `evaluated`, whether any phase
    reads it; `skipped_rows`, its rows in `data.skip_rows`, which count as used; `train` and `heldout`, the fields of
    `Use` for each split, with `bytes`, `lost_bytes`, and `in_loss`, whether a token of the first `ROWS` rows is.
    """
    found: dict[str, dict[str, Any]] = {}
    for name, source in prepared.sources.items():
        limit, manifest = config.evaluation.batches, source.manifest
        shares = [phase.shares[name] for phase in plan.phases if name in phase.shares]
        rows = (share.phase_rows.row(index) for share in shares for index in range(share.rows))
        text = heldout_text(config, prepared, name, limit)
        use = text.use if text else Tally(manifest.heldout.documents).use(0.0)
        phases = [phase.config.name for phase in plan.phases if name in phase.shares]
        evaluated = any(not phase.mixture or name in phase.mixture for phase in config.phases)
        found[name] = {"refused": manifest.counts, "unread_files": manifest.unread_files, "phases": phases}
        found[name] |= {"skipped_rows": _skipped_rows(config, plan, name), "evaluated": evaluated}
        found[name]["train"] = _of_split(plan.uses[name], manifest.train, rows)
        found[name]["heldout"] = _of_split(use, manifest.heldout, text.read() if text else ())
    return found


def _of_split(use: Use, entry: SplitEntry, rows: Iterable[dict[str, np.ndarray]]) -> dict[str, Any]:
    in_loss = any(row["loss_mask"].any() for row in islice(rows, ROWS))
    return use._asdict() | {"bytes": entry.text_bytes, "lost_bytes": entry.lost_bytes, "in_loss": in_loss}


def _skipped_rows(config: Config, plan: RunPlan, name: str) -> int:
    count = 0
    for phase in plan.phases:
        for ends in config.data.skip_rows if name in phase.shares else ():
            begin, end = (phase.mixture.counts(min(max(row - phase.first_row, 0), phase.rows)) for row in ends)
            place = phase.mixture.names.index(name)
            count += end[place] - begin[place]
    return count


def account_lines(found: dict[str, dict[str, Any]]) -> list[str]:
    """Return the account as one line, and a line more for whatever is left out or changed."""
    used = {split: sum(source[split]["used"] for source in found.values()) for split in SPLITS}
    documents = sum(source[split]["documents"] for source in found.values() for split in SPLITS)
    read = documents + sum(sum(source["refused"].values()) for source in found.values())
    left = read - sum(used.values())
    lines = [
        f"Data: {counted(read, 'document')} in {counted(len(found), 'source')}: {used['train']:,} trained on, "
        f"{used['heldout']:,} evaluated, {left:,} left out{':' if left else '.'}"
    ]
    for name, source in found.items():
        lines += [f"  {name}: {line}" for line in _source_lines(source)]
    return lines


def _source_lines(source: dict[str, Any]) -> list[str]:
    lines, refused, unread = [], source["refused"], source["unread_files"]
    if refused:
        count = counted(sum(refused.values()), "document")
        lines.append(f"{count} refused by the preparation: {list_counts(refused)}")
    if unread:
        lines.append(f"{counted(sum(unread.values()), 'item')} of its folders not read: {list_counts(unread)}")
    lines += [*_trained(source), *evaluated_lines(source["heldout"])]
    if source["evaluated"] and not source["heldout"]["documents"]:
        lines.append("no document is held out, so the source has no held-out loss (prepare it with a larger --heldout)")
    if source["skipped_rows"]:
        lines.append(f"{counted(source['skipped_rows'], 'row')} skipped (data.skip_rows), but counted as trained on")
    lost, total = (sum(source[split][key] for split in SPLITS) for key in ("lost_bytes", "bytes"))
    if lost:
        lines.append(f"{lost:,} of {total:,} bytes have no token in the tokenizer, and do not count in bits per byte")
    return lines


def _trained(source: dict[str, Any]) -> list[str]:
    use = source["train"]
    if not source["phases"] and use["documents"]:
        why = "no phase's mixture names the source: add it (weight 0 only evaluates it), or remove it"
        if source["evaluated"]:
            why = "it is only evaluated (mixture weight 0)"
        return [f"{counted(use['documents'], 'training document')} left out: {why}"]
    return _left_out(use, "training", _REASONS)


def evaluated_lines(use: dict[str, Any]) -> list[str]:
    """Return a line for each reason why held-out documents are not evaluated as they are; `use` is a `Use` as JSON."""
    return _left_out(use, "held-out", _REASONS | {"unread": "see evaluation.batches and the mixtures"})


def _left_out(use: dict[str, Any], split: str, reasons: dict[str, str]) -> list[str]:
    documents = counted(use["documents"], f"{split} document")
    lines = [f"{100 * use['read']:.1f} % of the {split} tokens are read"] if 0 < use["read"] < 0.9995 else []
    lines += [f"{use[key]:,} of {documents} left out: {reason}" for key, reason in reasons.items() if use[key]]
    if use["trimmed"]:
        how = "trimmed to a row, or without the reasoning of earlier turns, which the template leaves out"
        lines.append(f"{use['trimmed']:,} of {documents} {how}")
    if use["used"] and not use.get("in_loss", True):
        lines.append(f"no token of the first {ROWS:,} {split} rows is in the loss, which covers assistants' answers")
    return lines
