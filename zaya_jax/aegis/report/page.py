"""The page: one HTML file that loads nothing and runs no other script than its own."""

import base64
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from plotly.offline import get_plotlyjs

from zaya_jax.aegis.report import comparison, run_page, tables
from zaya_jax.aegis.report.page_plot import Plot
from zaya_jax.aegis.report.run_data import DAMAGE, RunData, Warn, make_or
from zaya_jax.errors import as_sentence
from zaya_jax.run.folder import CONFIG
from zaya_jax.run.page import render as render_page
from zaya_jax.run.table import Table

MARK = "<!doctype html><!-- run report of zaya_jax -->"  # how a page starts, so that only pages are replaced
_FOLDER = Path(__file__).parent
T = TypeVar("T")


class Text(NamedTuple):
    """Text that keeps its lines, in a part that opens on a click."""

    title: str
    text: str


Block = Plot | Table | Text | str  # a str is a sentence


def render(runs: Sequence[RunData], config: str | None = None) -> str:
    """Return the page about at least one run; `InputError` if the file `config`, to compare with, is invalid."""
    sections = _make_sections(runs, config)
    plots = [block for blocks in sections.values() for block in blocks if isinstance(block, Plot)]
    axes = [make_or({}, lambda run: run.axes, run) for run in runs]
    data = {"figures": [plot.figure for plot in plots], "axes": axes}
    figures = json.dumps(data, allow_nan=False, separators=(",", ":"), default=list)
    scripts = [get_plotlyjs(), (_FOLDER / "page.js").read_text(encoding="utf-8")]
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    unknown = Warn("failed", "The warnings about this run could not be made; a file of the run may be damaged.")
    return render_page(
        _FOLDER / "report.html.j2",
        mark=MARK,
        runs=runs,
        warnings=[make_or([unknown], lambda run: run.warnings, run) for run in runs],
        overview=tables.overview(runs),
        sections=sections,
        scripts=scripts,
        hashes=[f"sha256-{digest}" for digest in digests],
        made=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        figures=figures.replace("<", "\\u003c"),
    )


def _make_sections(runs: Sequence[RunData], config: str | None) -> dict[str, list[Block]]:
    compared = [tables.from_file(runs, config)] if config is not None else []  # an invalid file ends the command

    def every(*makers: Callable[[Sequence[RunData]], Any]) -> list[Block]:
        return [block for maker in makers for block in _blocks(maker, runs)]

    def each(*makers: Callable[[RunData], Any]) -> list[Block]:
        return [_named(block, run, runs) for maker in makers for run in runs for block in _blocks(maker, run)]

    sections = {
        "Loss": every(comparison.loss) + each(run_page.loss_by_source, run_page.bits_per_byte),
        "Data": each(tables.data),
        "Learning rate and batch": every(comparison.LEARNING_RATE.plot, comparison.BATCH.plot),
        "Speed": every(comparison.TOKENS_PER_SECOND.plot, comparison.utilization, comparison.DATA_WAIT.plot),
        "Routing": [
            *every(comparison.ENTROPY.plot, comparison.LARGEST_LOAD.plot),
            *each(run_page.expert_load, run_page.entropy_by_layer),
            *every(comparison.SKIP_RATE.plot, comparison.BIAS_RANGE.plot),
        ],
        "Gradients and updates": every(comparison.GRAD_NORM.plot) + each(run_page.norms),
        "Reliability": each(run_page.goodput, tables.faults, tables.skipped_steps, tables.checkpoints),
        "Evaluations and samples": each(tables.evaluations, _samples),
        "Configuration": [
            *(every(tables.between_runs) if len(runs) > 1 else []),
            *compared,
            *each(tables.from_parents, tables.changes, _config),
        ],
    }
    return {title: blocks for title, blocks in sections.items() if blocks}


def _named(block: Block, run: RunData, runs: Sequence[RunData]) -> Block:
    if len(runs) == 1:
        return block
    return f"{run.name}: {block}" if isinstance(block, str) else block._replace(title=f"{run.name}: {block.title}")


def _blocks(make: Callable[[T], Any], about: T) -> list[Block]:
    """Return the blocks that `make` returns or yields; damage in one file costs what is made of it."""
    try:
        made = make(about)
        blocks = [made] if isinstance(made, (str, Plot, Table, Text)) else list(made or ())
    except DAMAGE as error:
        why = f"{type(error).__name__}: {as_sentence(error)}"
        blocks = [f"A part of this section could not be made; a file of the run may be damaged. {why}"]
    return [block for block in blocks if not isinstance(block, Table) or block.rows or block.remarks]


def _samples(run: RunData) -> Iterator[Text]:
    for sample in run.summary.get("samples", ()):
        yield Text(f"Continuation of {sample['prompt']!r}", sample["prompt"] + sample["continuation"])


def _config(run: RunData) -> Text:
    return Text(CONFIG, (run.path / CONFIG).read_text(encoding="utf-8"))
