"""The sections of the page, in order."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from zaya_jax.aegis.report import comparison, run_page, settings, tables
from zaya_jax.aegis.report.page_plot import Plot
from zaya_jax.aegis.report.run_data import DAMAGE, RunData
from zaya_jax.errors import as_sentence
from zaya_jax.run.folder import CONFIG
from zaya_jax.run.table import Table


class Text(NamedTuple):
    """Text that keeps its lines, in a part that opens on a click."""

    title: str
    text: str


Block = Plot | Table | Text | str  # a str is a sentence


class Section(NamedTuple):
    """A section of the page."""

    title: str
    blocks: list[Block]


def make_sections(runs: Sequence[RunData], config: str | None = None) -> list[Section]:
    """Make the sections of a page about runs, which are compared with the file `config`, too."""
    compared = [settings.from_file(runs, config)] if config is not None else []  # an invalid file ends the command
    every, each = functools.partial(_of_all, runs), functools.partial(_of_each, runs)
    makers = {
        "Loss": every(comparison.loss) + each(run_page.loss_by_source, run_page.bits_per_byte),
        "Data": each(tables.data),
        "Learning rate and batch": every(comparison.LEARNING_RATE.plot, comparison.BATCH.plot),
        "Speed": every(comparison.TOKENS_PER_SECOND.plot, comparison.utilization, comparison.DATA_WAIT.plot),
        "Routing": [
            *every(comparison.ENTROPY.plot, comparison.LARGEST_LOAD.plot),
            *each(run_page.expert_load, run_page.entropy_by_layer),
            *every(comparison.SKIP_RATE.plot, comparison.BIAS_RANGE.plot),
        ],
        "Gradients and updates": every(comparison.GRAD_NORM.plot)
        + each(run_page.gradient_norms, run_page.update_norms),
        "Reliability": each(run_page.goodput, tables.faults, tables.skipped_steps, tables.checkpoints),
        "Evaluations and samples": each(tables.evaluations, _samples),
        "Configuration": [
            *(every(settings.between_runs) if len(runs) > 1 else []),
            lambda: compared,
            *each(settings.from_parents, settings.changes, _config),
        ],
    }
    made = [Section(title, list(_blocks(title, functions))) for title, functions in makers.items()]
    return [section for section in made if section.blocks]


def _of_all(runs: Sequence[RunData], *makers: Callable[[Sequence[RunData]], Any]) -> list[Callable[[], Any]]:
    """Return functions that make a block about all runs."""
    return [functools.partial(maker, runs) for maker in makers]


def _of_each(runs: Sequence[RunData], *makers: Callable[[RunData], Any]) -> list[Callable[[], Any]]:
    """Return functions that make the blocks of each run, named after the run if there are several."""

    def make(maker: Callable[[RunData], Any], run: RunData) -> Iterator[Block]:
        for block in _flat(maker(run)):
            if len(runs) == 1:
                yield block
            elif isinstance(block, str):
                yield f"{run.name}: {block}"
            else:
                yield block._replace(title=f"{run.name}: {block.title}")

    return [functools.partial(make, maker, run) for maker in makers for run in runs]


def _blocks(title: str, makers: Iterable[Callable[[], Any]]) -> Iterator[Block]:
    """Yield what can be shown; damage in one file costs what is made of it."""
    for make in makers:
        try:
            blocks = list(_flat(make()))
        except DAMAGE as error:
            why = f"{type(error).__name__}: {as_sentence(error)}"
            blocks = [f"A part of this section ({title}) could not be made; a file of the run may be damaged. {why}"]
        yield from (block for block in blocks if not isinstance(block, Table) or block.rows or block.remarks)


def _flat(made: Any) -> Iterator[Block]:
    if isinstance(made, (str, Plot, Table, Text)):
        yield made
    else:
        for each in made or ():
            yield from _flat(each)


def _samples(run: RunData) -> Iterator[Text]:
    for sample in run.summary.get("samples", ()):
        yield Text(f"Continuation of {sample['prompt']!r}", sample["prompt"] + sample["continuation"])


def _config(run: RunData) -> Text:
    return Text(CONFIG, (run.path / CONFIG).read_text(encoding="utf-8"))
