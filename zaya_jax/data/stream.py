"""The position of a source in a run: epoch after epoch, carried from phase to phase without repetition."""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np

from zaya_jax.config.phases import OverLength, Packing
from zaya_jax.data.bins import Bins, pack
from zaya_jax.data.items import Items, fit, whole_documents
from zaya_jax.data.rows import LANES, BinRows, PackedRows, Row, Windows
from zaya_jax.data.shards import Documents
from zaya_jax.errors import InputError
from zaya_jax.run.files import partial_name

_ALGORITHM = "best-fit-1"  # of `pack`; another one must not find these plans


class Position(NamedTuple):
    """How far a source has been read."""

    epoch: int = 0
    rest: Items | None = None  # of this epoch, in the order to come; None where nothing of it was read
    content: str = ""  # digest of the documents that `rest` is of
    lengths: np.ndarray | None = None  # of those documents

    @property
    def epochs_read(self) -> float:
        """Epochs read, the last one as the fraction of its predictions that was made."""
        if self.rest is None or self.lengths is None:
            return float(self.epoch)
        return self.epoch + 1 - _predictions(self.rest.length) / max(_predictions(self.lengths), 1)

    def unread_documents(self, lengths: np.ndarray) -> Items:
        """Documents of which nothing was read, in the order to come, with `lengths` as their new lengths."""
        if self.rest is None or self.lengths is None:
            return whole_documents(lengths)
        left = np.bincount(self.rest.document, np.maximum(self.rest.length - 1, 0), len(self.lengths))
        unread = left == np.maximum(self.lengths - 1, 0)
        chosen = self.rest.document[(self.rest.start == 0) & unread[self.rest.document]]
        return Items(chosen, np.zeros_like(chosen), lengths[chosen])


@dataclass(frozen=True)
class PackedEpoch:
    """Items of one epoch as rows."""

    rows: PackedRows
    trimmed: Items | None  # the items before they were trimmed; None where they were not
    most: int  # tokens they were trimmed to
    left_out: Items  # by that policy
    counts: dict[str, int]  # see `Fitted`
    padding: float  # part of the rows' tokens that stand for nothing


@dataclass(frozen=True)
class PhaseRows:
    """The rows of a source in one phase: what is left of an epoch, then whole ones."""

    epoch: int
    first: PackedEpoch
    later: PackedEpoch
    content: str
    lengths: np.ndarray  # of the documents

    def row(self, index: int) -> Row:
        """Row `index` of the source in this phase, see `PackedRows.row`."""
        epoch, place, packed = self._locate(index)
        return packed.rows.row(epoch, place)

    def after(self, rows: int, before: Position) -> Position:
        """The position after `rows` rows of a phase that began at the position `before`."""
        if rows == 0:
            return before
        epoch, place, packed = self._locate(rows - 1)
        rest = packed.rows.after(epoch, place + 1)
        if packed.trimmed is not None:
            rest = rest.untrimmed(packed.trimmed, packed.most)
        rest += packed.left_out
        if (rest.length == 1).all():  # such a token was predicted, and predicts nothing
            return Position(epoch + 1)
        return Position(epoch, rest, self.content, self.lengths)

    def _locate(self, index: int) -> tuple[int, int, PackedEpoch]:
        beyond = index - self.first.rows.per_epoch
        if beyond < 0:
            return self.epoch, index, self.first
        epoch, place = divmod(beyond, self.later.rows.per_epoch)
        return self.epoch + 1 + epoch, place, self.later


class Packer(NamedTuple):
    """How documents become rows."""

    packing: Packing
    over_length: OverLength
    context: int
    seed: int | None  # of the order; None leaves it
    plans: Path  # folder that keeps bins

    def phase_rows(self, documents: Documents, content: str, position: Position, key: str) -> PhaseRows:
        """The rows of a source from `position` on.

        Args:
          documents: of the source, as this phase reads them.
          content: their digest.
          position: where the phase before left the source.
          key: of the source in the configuration, for messages.

        Raises:
          InputError: the policy for long documents leaves nothing.
        """
        everything = whole_documents(documents.lengths)
        later = self._pack(documents, everything, self.seed)
        if later.rows.per_epoch == 0:
            raise InputError(f"{key} yields no row of {self.context} tokens: its {len(documents)} documents are all "
                             f"too short, or dropped by over_length {self.over_length!r}.")  # fmt: skip
        if position.rest is None:
            return PhaseRows(position.epoch, later, later, content, documents.lengths)
        # Conversations written out anew have other tokens: one that was begun is over.
        rest = position.rest if position.content == content else position.unread_documents(documents.lengths)
        # Windows go on in the order that was; bins have none.
        first = self._pack(documents, rest, None if self.packing == "windows" else self.seed)
        return PhaseRows(position.epoch, first, later, content, documents.lengths)

    def _pack(self, documents: Documents, items: Items, seed: int | None) -> PackedEpoch:
        absent = items.length == 0  # conversations that do not fit here
        fitted = fit(items.take(~absent), self.context, self.over_length, whole=self.packing == "bins")
        if self.packing == "bins":
            bins = cached_bins(fitted.used.length - 1, self.context, self.plans)
            rows: PackedRows = BinRows(documents, fitted.used, bins, self.context, seed=seed)
            filled = int((fitted.used.length - 1).sum())
        else:
            # Text without an order of its own is read as it lies: all of it, once.
            rows = Windows(documents, fitted.used, self.context, seed=seed, lanes=1 if self.seed is None else LANES)
            filled = max(fitted.used.tokens - 1, 0)
        padding = 1 - filled / max(rows.per_epoch * self.context, 1)
        return PackedEpoch(
            rows,
            items if self.over_length == "trim" else None,
            self.context + 1,
            fitted.dropped + items.take(absent),
            fitted.counts,
            padding,
        )


def _predictions(lengths: np.ndarray) -> int:
    return int(np.maximum(lengths - 1, 0).sum())


def cached_bins(sizes: np.ndarray, capacity: int, plans: Path) -> Bins:
    """The bins of `sizes`, packed once: they are cached in the folder `plans`, named by what they depend on."""
    digest = hashlib.blake2b(np.ascontiguousarray(sizes, "<i8").tobytes(), digest_size=12).hexdigest()
    path = plans / f"{_ALGORITHM}-{digest}-{capacity}.npz"
    try:
        with np.load(path, allow_pickle=False) as saved:
            bins = Bins(saved["members"], saved["starts"])
        if _is_valid(bins, sizes, capacity):
            return bins
    except (OSError, EOFError, ValueError, KeyError, BadZipFile):
        pass  # none yet, or a damaged one, which planning replaces
    bins = pack(sizes, capacity)
    plans.mkdir(parents=True, exist_ok=True)
    part = partial_name(path)
    with part.open("wb") as file:
        np.savez(file, members=bins.members, starts=bins.starts)
    os.replace(part, path)
    return bins


def _is_valid(bins: Bins, sizes: np.ndarray, capacity: int) -> bool:
    """Whether each item stands in one bin, and no bin holds more than it can."""
    members, starts = bins.members, bins.starts
    if members.shape != sizes.shape or starts[0] != 0 or starts[-1] != len(members) or (np.diff(starts) < 1).any():
        return False
    if len(members) == 0:
        return True
    if members.min() < 0 or members.max() >= len(sizes) or np.bincount(members, minlength=len(sizes)).max() > 1:
        return False
    return bool(np.add.reduceat(sizes[members], starts[:-1]).max() <= capacity)
