"""Report on the data of a configured run: sources, phases, padding, lengths, samples."""

from typing import get_args

import numpy as np

from zaya_jax.config import Config
from zaya_jax.config.checks import counted
from zaya_jax.config.stages import BatchStage, stages
from zaya_jax.data.chat.trimming import Outcome
from zaya_jax.data.loading.account import account, account_lines
from zaya_jax.data.loading.packed_rows import Row
from zaya_jax.data.loading.run_plan import PhasePlan, SourceShare, plan_run
from zaya_jax.data.loading.sources import Prepared, open_sources
from zaya_jax.data.prepare.manifest import SPLITS
from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.run.table import format_table

_SHOWN = 600  # maximum characters of a document in a sample


def describe(config: Config, samples: int = 1) -> str:
    """Plan a run's data and report on it. Prepared corpora, rendered conversations and bins are cached for the run.

    `samples` is the number of rows to show per phase and source. `InputError` if the data cannot be used.
    """
    prepared = open_sources(config)
    plan = plan_run(config, prepared)
    parts = [_sources(prepared)]
    for index, phase in enumerate(plan.phases):
        parts.append(_phase(phase, [stage for stage in stages(config) if stage.phase == index]))
    legend = "[[text]] is covered by the loss, ---- separates documents"
    for phase in plan.phases:
        for name, share in phase.shares.items():
            for number in range(min(samples, share.rows)):
                text = render_row(share.phase_rows.row(number), prepared.tokenizer)
                parts.append(f"Phase {phase.config.name}, source {name}, row {number} ({legend}):\n{text}")
    parts.append("\n".join(account_lines(account(config, prepared, plan))))
    return "\n\n".join(parts)


def render_row(row: Row, tokenizer: Tokenizer) -> str:
    """Return the text of a row, shortened, with [[ and ]] around what the loss covers."""
    parts, length = [], 0
    for segment in range(1, int(row["segment_ids"].max()) + 1):
        here = np.flatnonzero(row["segment_ids"] == segment)
        # The first token of a segment is not predicted.
        tokens = np.concatenate([row["tokens"][here[:1]], row["targets"][here]])
        counted = np.concatenate([[False], row["loss_mask"][here]])
        if _targets_next_document(row, int(here[-1])):
            tokens, counted = tokens[:-1], counted[:-1]
        edges = np.flatnonzero(np.diff(counted.astype(np.int8))) + 1
        text = ""
        for run, flags in zip(np.split(tokens, edges), np.split(counted, edges), strict=True):
            decoded = tokenizer.decode(run.tolist())
            text += f"[[{decoded}]]" if flags[0] else decoded
        parts.append(text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} … {text[-_SHOWN // 2 :]}")
        length += len(parts[-1])
        if length > 2 * _SHOWN:
            parts.append("…")
            break
    return "\n----\n".join(parts)


def _targets_next_document(row: Row, last: int) -> bool:
    """Return whether the last target of a document is the next document's first token, as in windows."""
    if row["loss_mask"][last] or last + 1 == len(row["tokens"]) or row["segment_ids"][last + 1] == 0:
        return False
    return bool(row["targets"][last] == row["tokens"][last + 1])


def _sources(prepared: Prepared) -> str:
    rows: list[tuple[str, ...]] = [("source", "kind", "split", "documents", "tokens", "bytes", "bytes/token")]
    examples = []
    for name, source in prepared.sources.items():
        for split in SPLITS:
            entry = source.manifest.split(split)
            counts = [f"{count:,}" for count in (entry.documents, entry.tokens, entry.text_bytes)]
            ratio = f"{entry.text_bytes / max(entry.tokens, 1):.2f}"
            rows.append((name, source.manifest.kind, split, *counts, ratio))
        examples += [f"{name}: refused: {example}" for example in source.manifest.examples]
    return "\n".join([*format_table(rows), *examples])


def _phase(phase: PhasePlan, stages: list[BatchStage]) -> str:
    settings = phase.config
    lengths = "lengths (median / 95 % / longest)"
    rows = [("source", "rows", "tokens", "share", "epochs", "padding", "long documents", lengths)]
    trimmed = []
    for name, share in phase.shares.items():
        epoch = share.phase_rows.first
        fates = share.phase_rows.later.counts  # of all documents, as the account; the first epoch can have only parts
        long = ", ".join(f"{count:,} {outcome}" for outcome, count in fates.items() if count) or "none"
        if settings.packing == "windows" and settings.over_length == "split":
            long = "split by windows"
        counts = f"{share.rows:,}", f"{share.rows * phase.context:,}", f"{100 * share.rows / phase.rows:.2f} %"
        rows.append((name, *counts, f"{share.epochs:.3f}", f"{100 * epoch.padding:.3f} %", long, _lengths(share)))
        if share.counts:
            outcomes = [f"{share.counts.get(each, 0):,} {each.replace('_', ' ')}" for each in get_args(Outcome)]
            trimmed.append(f"{name}: conversations trimmed to {phase.context:,} tokens: {', '.join(outcomes)}")
    batch = " then ".join(f"{stage.sequences:,}" for stage in stages)
    trained = sum(stage.steps * stage.sequences for stage in stages)
    skipped = f", {counted(phase.rows - trained, 'row')} skipped" if trained < phase.rows else ""
    head = (
        f"Phase {settings.name}: steps {stages[0].first_step:,} to {stages[-1].end:,}, {batch} rows of "
        f"{phase.context:,} tokens per step, {settings.packing}, {trained * phase.context:,} tokens in all{skipped}"
    )
    return "\n".join([head, *format_table(rows), *trimmed])


def _lengths(share: SourceShare) -> str:
    tokens = share.documents.lengths[share.documents.lengths > 0]
    return " / ".join(f"{length:,.0f}" for length in np.percentile(tokens, [50, 95, 100])) if len(tokens) else "none"
