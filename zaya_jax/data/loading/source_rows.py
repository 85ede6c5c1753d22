"""Read a source epoch by epoch. Each phase continues where the previous one stopped."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np

from zaya_jax.config.phases import OverLength, Packing
from zaya_jax.data.loading.bin_packing import Bins, pack
from zaya_jax.data.loading.document_parts import Items, fit, whole_documents
from zaya_jax.data.loading.packed_rows import LANES, BinRows, PackedRows, Row, Windows
from zaya_jax.data.prepare.shards import Documents
from zaya_jax.errors import InputError
from zaya_jax.run.files import open_regular
from zaya_jax.run.writing import make_folder, new_file

_ALGORITHM = "best-fit-1"  # version of `pack` in the names of cached plans; change it with the algorithm


class Position(NamedTuple):
    """The position in a source."""

    epoch: int = 0
    rest: Items | None = None  # unread items of the epoch, in reading order; None at its start
    content: str = ""  # digest of the documents that `rest` refers to
    lengths: np.ndarray | None = None  # int64 [documents], tokens of each of them

    @property
    def epochs_read(self) -> float:
        """Number of epochs read; the last one counts by the fraction of its targets that were predicted."""
        if self.rest is None or self.lengths is None:
            return float(self.epoch)
        return self.epoch + 1 - _predictions(self.rest.length) / max(_predictions(self.lengths), 1)

    def unread_documents(self, lengths: np.ndarray) -> Items:
        """Return the documents of which nothing was read, in reading order, with `lengths` as their new lengths."""
        if self.rest is None or self.lengths is None:
            return whole_documents(lengths)
        unread = _targets(self.rest, len(self.lengths)) == np.maximum(self.lengths - 1, 0)
        chosen = self.rest.document[(self.rest.start == 0) & unread[self.rest.document]]
        return Items(chosen, np.zeros_like(chosen), lengths[chosen])


@dataclass(frozen=True)
class PackedEpoch:
    """The items of one epoch, packed into rows."""

    rows: PackedRows
    items: Items  # all of them, before trimming
    most: int | None  # tokens to which items were trimmed; None if the phase does not trim
    left_out: Items  # items that the phase does not read, because they are too long
    counts: dict[str, int]  # see `Fitted`
    padding: float  # fraction of the rows' tokens that are padding


@dataclass(frozen=True)
class PhaseRows:
    """The rows of a source in one phase: first the rest of an epoch, then whole epochs."""

    epoch: int
    first: PackedEpoch
    later: PackedEpoch
    content: str
    lengths: np.ndarray  # int64 [documents], tokens of each

    def row(self, index: int) -> Row:
        """Return row `index` of the source in this phase, see `packed_rows.Windows.row`."""
        epoch, place, packed = self._locate(index)
        return packed.rows.row(epoch, place)

    def after(self, rows: int, before: Position) -> Position:
        """Return the position after `rows` rows of a phase that starts at the position `before`."""
        if rows == 0:
            return before
        epoch, place, packed = self._locate(rows - 1)
        rest = packed.rows.after(epoch, place + 1)
        if packed.most is not None:
            rest = rest.untrimmed(packed.items, packed.most)
        rest += packed.left_out
        if (rest.length == 1).all():  # a last token was already predicted, and has no target
            return Position(epoch + 1)
        return Position(epoch, rest, self.content, self.lengths)

    def predicted(self, rows: int, after: Position) -> np.ndarray:
        """Return, bool [documents], of which documents the first `rows` rows predict a token; see `after`."""
        count = len(self.lengths)
        if rows == 0:
            return np.zeros(count, bool)
        epoch, _, packed = self._locate(rows - 1)
        rest = packed.left_out if after.rest is None else after.rest
        read = _targets(packed.items, count) > _targets(rest, count)
        for before in [self.first, self.later][: epoch - self.epoch]:  # whole epochs
            read |= _targets(before.items, count) > _targets(before.left_out, count)
        return read

    def _locate(self, index: int) -> tuple[int, int, PackedEpoch]:
        beyond = index - self.first.rows.per_epoch
        if beyond < 0:
            return self.epoch, index, self.first
        epoch, place = divmod(beyond, self.later.rows.per_epoch)
        return self.epoch + 1 + epoch, place, self.later


class Packer(NamedTuple):
    """Packs documents into rows."""

    packing: Packing
    over_length: OverLength
    context: int
    seed: int | None  # shuffles the rows; None keeps the order of the documents
    plans: Path  # folder of cached bins

    def phase_rows(self, documents: Documents, content: str, position: Position, key: str) -> PhaseRows:
        """Pack the documents of a source, as this phase reads them, from `position` on.

        `content` is the digest of the documents; `key` names the source in messages. `InputError` if none is left.
        """
        later = self.pack(documents)
        if later.rows.per_epoch == 0:
            raise InputError(
                f"{key} yields no row of {self.context} tokens: all its documents ({len(documents):,}) are too short, "
                f"or dropped as too long (over_length is {self.over_length}). Choose another over_length or context."
            )
        if position.rest is None:
            return PhaseRows(position.epoch, later, later, content, documents.lengths)
        # A new template or limit changes the tokens of conversations, so those read in part cannot be continued.
        rest = position.rest if position.content == content else position.unread_documents(documents.lengths)
        # Windows keep the order of the epoch; the remaining items of bins are packed and shuffled again.
        first = self._pack(documents, rest, None if self.packing == "windows" else self.seed)
        return PhaseRows(position.epoch, first, later, content, documents.lengths)

    def pack(self, documents: Documents) -> PackedEpoch:
        """Pack all documents, which may be none."""
        return self._pack(documents, whole_documents(documents.lengths), self.seed)

    def _pack(self, documents: Documents, items: Items, seed: int | None) -> PackedEpoch:
        absent = items.length == 0  # conversations that could not be trimmed to fit
        fitted = fit(items.take(~absent), self.context, self.over_length, whole=self.packing == "bins")
        if self.packing == "bins":
            bins = cached_bins(fitted.used.length - 1, self.context, self.plans)
            rows: PackedRows = BinRows(documents, fitted.used, bins, self.context, seed=seed)
            filled = int((fitted.used.length - 1).sum())
        else:
            # Without a seed (evaluation), windows are read from the first to the last.
            rows = Windows(documents, fitted.used, self.context, seed=seed, lanes=1 if self.seed is None else LANES)
            filled = max(int(fitted.used.length.sum()) - 1, 0)
        most = self.context + 1 if self.over_length == "trim" else None
        padding = 1 - filled / max(rows.per_epoch * self.context, 1)
        return PackedEpoch(rows, items, most, fitted.dropped + items.take(absent), fitted.counts, padding)


def _targets(items: Items, documents: int) -> np.ndarray:
    """Count the tokens of each document that its items predict."""
    return np.bincount(items.document, np.maximum(items.length - 1, 0), documents)


def _predictions(lengths: np.ndarray) -> int:
    return int(np.maximum(lengths - 1, 0).sum())


def cached_bins(sizes: np.ndarray, capacity: int, plans: Path) -> Bins:
    """Pack `sizes` into bins, or load the bins cached in the folder `plans` under a digest of the arguments."""
    digest = hashlib.blake2b(np.ascontiguousarray(sizes, "<i8").tobytes(), digest_size=12).hexdigest()
    path = plans / f"{_ALGORITHM}-{digest}-{capacity}.npz"
    try:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as saved:
            return Bins(saved["members"], saved["starts"])
    except (OSError, EOFError, ValueError, KeyError, BadZipFile):
        pass  # absent, or damaged, which its checksums tell: packed and written again below
    bins = pack(sizes, capacity)
    make_folder(plans)
    with new_file(path) as file:
        np.savez(file, members=bins.members, starts=bins.starts)
    return bins
