"""The sections of the page, in order."""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from zaya_jax.errors import as_sentence
from zaya_jax.report import comparison, settings, single, tables
from zaya_jax.report.page_plot import Plot
from zaya_jax.report.subject import DAMAGE, Subject
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


def make_sections(subjects: Sequence[Subject], config: str | None = None) -> list[Section]:
    """Make the sections of a page about runs, which are compared with the file `config`, too."""
    compared = [settings.from_file(subjects, config)] if config is not None else []  # an invalid file ends the command
    by_title: dict[str, list[Callable[[], Any]]] = {
        "Loss": [
            *_all(subjects, comparison.loss),
            *_each(subjects, single.loss_by_source, single.bits_per_byte),
        ],
        "Data": _each(subjects, tables.data),
        "Learning rate and batch": _all(subjects, comparison.learning_rate, comparison.batch),
        "Speed": _all(subjects, comparison.tokens_per_second, comparison.utilization, comparison.data_wait),
        "Routing": [
            *_all(subjects, comparison.entropy, comparison.largest_load),
            *_each(subjects, single.expert_load, single.entropy_by_layer),
            *_all(subjects, comparison.skip_rate, comparison.bias_range),
        ],
        "Gradients and updates": [
            *_all(subjects, comparison.grad_norm),
            *_each(subjects, lambda subject: single.norms(subject, "grad_norm_by_role"),
                   lambda subject: single.norms(subject, "update_norm_by_role")),
        ],
        "Reliability": _each(subjects, single.goodput, tables.faults, tables.skipped_steps, tables.checkpoints),
        "Evaluations and samples": _each(subjects, tables.evaluations, _samples),
        "Configuration": [
            *([lambda: settings.between_runs(subjects)] if len(subjects) > 1 else []),
            lambda: compared,
            *_each(subjects, settings.from_parents, settings.changes,
                   lambda subject: Text(CONFIG, (subject.path / CONFIG).read_text(encoding="utf-8"))),
        ],
    }  # fmt: skip
    made = [Section(title, list(_blocks(title, makers))) for title, makers in by_title.items()]
    return [section for section in made if section.blocks]


def _all(subjects: Sequence[Subject], *makers: Callable[[Sequence[Subject]], Any]) -> list[Callable[[], Any]]:
    """Return functions that make a block about all runs."""
    return [functools.partial(maker, subjects) for maker in makers]


def _each(subjects: Sequence[Subject], *makers: Callable[[Subject], Any]) -> list[Callable[[], Any]]:
    """Return functions that make the blocks of each run, named after the run if there are several."""

    def make(maker: Callable[[Subject], Any], subject: Subject) -> Iterator[Block]:
        for block in _flat(maker(subject)):
            if len(subjects) == 1:
                yield block
            elif isinstance(block, str):
                yield f"{subject.name}: {block}"
            else:
                yield block._replace(title=f"{subject.name}: {block.title}")

    return [lambda maker=maker, subject=subject: make(maker, subject) for maker in makers for subject in subjects]


def _blocks(title: str, makers: Iterable[Callable[[], Any]]) -> Iterator[Block]:
    """Yield what can be shown; damage in one file costs what is made of it."""
    for make in makers:
        try:
            blocks = list(_flat(make()))
        except DAMAGE as error:
            blocks = [f"A part of this section ({title}) could not be made; a file of the run may be damaged. "
                      f"{type(error).__name__}: {as_sentence(error)}"]  # fmt: skip
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


def _samples(subject: Subject) -> list[Text]:
    return [Text(f"Continuation of {sample['prompt']!r}", sample["prompt"] + sample["continuation"])
            for sample in subject.summary.get("samples", ())]  # fmt: skip
