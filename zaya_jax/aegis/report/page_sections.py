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
    by_title: dict[str, list[Callable[[], Any]]] = {
        "Loss": [
            *_all(runs, comparison.loss),
            *_each(runs, run_page.loss_by_source, run_page.bits_per_byte),
        ],
        "Data": _each(runs, tables.data),
        "Learning rate and batch": _all(runs, comparison.learning_rate, comparison.batch),
        "Speed": _all(runs, comparison.tokens_per_second, comparison.utilization, comparison.data_wait),
        "Routing": [
            *_all(runs, comparison.entropy, comparison.largest_load),
            *_each(runs, run_page.expert_load, run_page.entropy_by_layer),
            *_all(runs, comparison.skip_rate, comparison.bias_range),
        ],
        "Gradients and updates": [
            *_all(runs, comparison.grad_norm),
            *_each(
                runs,
                lambda run: run_page.norms(run, "grad_norm_by_role"),
                lambda run: run_page.norms(run, "update_norm_by_role"),
            ),
        ],
        "Reliability": _each(runs, run_page.goodput, tables.faults, tables.skipped_steps, tables.checkpoints),
        "Evaluations and samples": _each(runs, tables.evaluations, _samples),
        "Configuration": [
            *([lambda: settings.between_runs(runs)] if len(runs) > 1 else []),
            lambda: compared,
            *_each(
                runs,
                settings.from_parents,
                settings.changes,
                lambda run: Text(CONFIG, (run.path / CONFIG).read_text(encoding="utf-8")),
            ),
        ],
    }
    made = [Section(title, list(_blocks(title, makers))) for title, makers in by_title.items()]
    return [section for section in made if section.blocks]


def _all(runs: Sequence[RunData], *makers: Callable[[Sequence[RunData]], Any]) -> list[Callable[[], Any]]:
    """Return functions that make a block about all runs."""
    return [functools.partial(maker, runs) for maker in makers]


def _each(runs: Sequence[RunData], *makers: Callable[[RunData], Any]) -> list[Callable[[], Any]]:
    """Return functions that make the blocks of each run, named after the run if there are several."""

    def make(maker: Callable[[RunData], Any], run: RunData) -> Iterator[Block]:
        for block in _flat(maker(run)):
            if len(runs) == 1:
                yield block
            elif isinstance(block, str):
                yield f"{run.name}: {block}"
            else:
                yield block._replace(title=f"{run.name}: {block.title}")

    return [lambda maker=maker, run=run: make(maker, run) for maker in makers for run in runs]


def _blocks(title: str, makers: Iterable[Callable[[], Any]]) -> Iterator[Block]:
    """Yield what can be shown; damage in one file costs what is made of it."""
    for make in makers:
        try:
            blocks = list(_flat(make()))
        except DAMAGE as error:
            blocks = [
                f"A part of this section ({title}) could not be made; a file of the run may be damaged. "
                f"{type(error).__name__}: {as_sentence(error)}"
            ]
        for block in blocks:
            if not isinstance(block, Table) or block.rows or block.remarks:
                yield block


def _flat(made: Any) -> Iterator[Block]:
    if made is None:
        return
    if isinstance(made, (str, Plot, Table, Text)):
        yield made
    else:
        for each in made:
            yield from _flat(each)


def _samples(run: RunData) -> list[Text]:
    return [
        Text(f"Continuation of {sample['prompt']!r}", sample["prompt"] + sample["continuation"])
        for sample in run.summary.get("samples", ())
    ]
