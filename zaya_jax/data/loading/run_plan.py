"""Plan which rows each step of a run reads. Every row is a function of its index, so a run resumes from that alone."""

import bisect
import dataclasses
import hashlib
from typing import NamedTuple

import numpy as np

from zaya_jax.config import Config, PhaseConfig
from zaya_jax.config.data import CORPUS
from zaya_jax.config.stages import phase_steps, rows_before
from zaya_jax.data.loading.document_parts import Tally, Use
from zaya_jax.data.loading.mixture import Mixture
from zaya_jax.data.loading.packed_rows import Row
from zaya_jax.data.loading.source_rows import Packer, PhaseRows, Position
from zaya_jax.data.loading.sources import Prepared, Source
from zaya_jax.data.prepare.manifest import json_digest
from zaya_jax.data.prepare.shards import Documents
from zaya_jax.errors import InputError


class SourceShare(NamedTuple):
    """The rows that a phase reads from one source, including those that it skips."""

    rows: int
    epochs: float  # passes over the source in this phase
    phase_rows: PhaseRows
    documents: Documents
    counts: dict[str, int]  # trimming outcome → number of conversations, see `trimming.Outcome`


@dataclasses.dataclass(frozen=True)
class PhasePlan:
    """The rows of one phase, including those that it skips."""

    config: PhaseConfig
    context: int  # tokens per row
    first_row: int  # index in the run
    rows: int
    mixture: Mixture
    shares: dict[str, SourceShare]
    bytes_per_token: float | None  # average UTF-8 bytes of text; None if the loss masks some tokens (chat)
    order: str  # digest of everything that determines the rows and their order


@dataclasses.dataclass(frozen=True)
class RunPlan:
    """All rows of a run, including those that it skips. Picklable and thread-safe.

    Rows are those of `packed_rows.Windows.row`. If the run has several sources, they also have `sources` int16 [s],
    filled with the index of the row's source.
    """

    phases: tuple[PhasePlan, ...]
    uses: dict[str, Use]  # of the training documents of each source of the run, in order

    def __len__(self) -> int:
        return self.phases[-1].first_row + self.phases[-1].rows

    def __getitem__(self, index: int) -> Row:
        phase = self.phases[bisect.bisect_right(self.phases, index, key=lambda phase: phase.first_row) - 1]
        source, place = phase.mixture.locate(index - phase.first_row)
        name, names = phase.mixture.names[source], list(self.uses)
        row = phase.shares[name].phase_rows.row(place)
        return row if len(names) == 1 else row | {"sources": np.full(phase.context, names.index(name), np.int16)}


def plan_run(config: Config, prepared: Prepared) -> RunPlan:
    """Plan the rows that each step of a run reads: a pure function of the configuration and the content of the sources.

    `InputError` if a source would be read more often than its `max_epochs`, or yields no row in a phase.
    """
    positions = dict.fromkeys(prepared.sources, Position())
    tallies = {name: Tally(source.manifest.train.documents) for name, source in prepared.sources.items()}
    phases: list[PhasePlan] = []
    for index, (phase, (begin, end)) in enumerate(zip(config.phases, phase_steps(config), strict=True)):
        context, first_row = config.context_for(phase), rows_before(config, begin)
        weights = phase.mixture or {name: s.manifest.train.tokens for name, s in prepared.sources.items()}
        mixture = Mixture({name: weight for name, weight in weights.items() if weight})
        rows, shares = rows_before(config, end) - first_row, {}
        for name, count in zip(mixture.names, mixture.counts(rows), strict=True):
            documents, manifest = prepared.open(name, "train", phase, context)
            packer = make_packer(config, prepared, phase, _source_seed(config, name))
            phase_rows = packer.phase_rows(documents, manifest.content, positions[name], f"data.sources.{name}")
            before, after = positions[name], phase_rows.after(count, positions[name])
            epochs, most = after.epochs_read, prepared.sources[name].max_epochs
            if most is not None and epochs > most + 1e-9:
                raise InputError(
                    f"By the end of {config.phase_key(index)} the source {name} would be read {epochs:.3f} times, but "
                    f"data.sources.{name}.max_epochs is {most:g}; lower its weight, shorten the phase, or raise the "
                    "limit."
                )
            counts = manifest.counts if prepared.sources[name].manifest.kind == "chat" else {}
            later, read = phase_rows.later, phase_rows.predicted(count, after)
            trimmed = trimmed_documents(later.counts, counts)
            tallies[name].add(documents.lengths, later.left_out, read, trimmed)
            shares[name] = SourceShare(count, epochs - before.epochs_read, phase_rows, documents, counts)
            positions[name] = after
        # Of what determines the rows and their order: batch size and token budget do not.
        parts = zip(shares.items(), mixture.counts(mixture.period), strict=True)
        sources = [[name, weight, share.phase_rows.content] for (name, share), weight in parts]
        order = json_digest(config.seed, first_row, context, phase.packing, phase.over_length, sources)
        density = _bytes_per_token(prepared, shares)
        phases.append(PhasePlan(phase, context, first_row, rows, mixture, shares, density, order))
    return RunPlan(tuple(phases), {name: tally.use(positions[name].epochs_read) for name, tally in tallies.items()})


def make_packer(config: Config, prepared: Prepared, phase: PhaseConfig, seed: int | None) -> Packer:
    """Return the packer of a phase. `seed` shuffles the rows; None keeps the order of the documents."""
    return Packer(phase.packing, phase.over_length, config.context_for(phase), seed, prepared.cache / "plans")


def trimmed_documents(of_texts: dict[str, int], of_conversations: dict[str, int]) -> int:
    """Count trimmed documents, from `document_parts.Fitted.counts` and from the outcomes of `trimming.trim`."""
    return of_texts["trimmed"] + sum(of_conversations.get(each, 0) for each in ("reasoning_cut", "earlier_removed"))


def heldout_phase(config: Config, source: Source, phase: int) -> PhaseConfig | None:
    """Return the settings that pack a source's held-out documents during a phase; None if no phase reads the source.

    Packing and template are those of the last phase so far that reads the source, or of the first one to come. Long
    texts are split, so every token is evaluated; conversations are trimmed if the phase trims them.
    """
    reading = [index for index, each in enumerate(config.phases) if not each.mixture or source.name in each.mixture]
    if not reading:
        return None
    chosen = config.phases[max((index for index in reading if index <= phase), default=reading[0])]
    trimmed = source.manifest.kind == "chat" and chosen.over_length == "trim"
    context, over_length = config.context_for(config.phases[phase]), "trim" if trimmed else "split"
    return dataclasses.replace(chosen, context=context, over_length=over_length)


def _bytes_per_token(prepared: Prepared, shares: dict[str, SourceShare]) -> float | None:
    total = 0.0
    for name, share in shares.items():
        manifest = prepared.sources[name].manifest
        if manifest.kind == "chat":
            return None
        kept = manifest.train.text_bytes - manifest.train.lost_bytes
        total += share.rows * kept / manifest.train.tokens
    return total / sum(share.rows for share in shares.values())


def _source_seed(config: Config, name: str) -> int:
    """Return the seed of a source. Each has its own, so that sources of equal size get different orders."""
    own = 0 if name == CORPUS else int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
    return config.seed + (own << 32)
