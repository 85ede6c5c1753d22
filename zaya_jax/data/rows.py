"""Rows of a fixed length from items, each row a function of its index alone.

Nothing is carried from one row to the next: any row can be made first, by any process, and a run resumes by
knowing one number.
"""

import functools
import itertools
from typing import NamedTuple, Protocol

import numpy as np

from zaya_jax.data.bins import Bins
from zaya_jax.data.items import Items
from zaya_jax.data.shards import Documents, Text

Row = dict[str, np.ndarray]

LANES = 64  # places of the concatenation that windows are read from in rotation

_CACHED_EPOCHS = 2  # orders in memory: prefetching threads work on both sides of an epoch's end


class DocumentPart(NamedTuple):
    """The tokens [start, stop) of a document."""

    document: int
    start: int
    stop: int


class PackedRows(Protocol):
    """Items as rows, in an order of each epoch's own."""

    @property
    def per_epoch(self) -> int:
        """Rows of an epoch."""
        ...

    def row(self, epoch: int, index: int) -> Row:
        """Row `index` of an epoch.

        Returns:
          Arrays of shape [s]. `tokens` and `targets` int32: what the model sees and what follows it.
          `segment_ids` int32: 1, 2, 3, … for the items in the row, 0 for padding. `positions` int32: from 0 in each
          item. `loss_mask` bool: true where the target belongs to the same item as the token and the loss counts it.
        """
        ...

    def parts(self, epoch: int, index: int) -> list[DocumentPart]:
        """The parts of documents that row `index` of an epoch is made of; the first token of each is only an input."""
        ...

    def after(self, epoch: int, rows: int) -> Items:
        """What the first `rows` rows of an epoch leave of its items, in the order they would have come."""
        ...


class Windows:
    """Windows over the concatenation of the items; of s + 1 tokens each, one shared with the next window.

    An epoch predicts each token of the concatenation but the first once. The concatenation is cut into lanes of as
    many windows each, and rows take the lanes in turn: neighbouring windows are often of one document, and a batch
    of them would teach that document alone.
    """

    def __init__(
        self, documents: Documents, items: Items, context: int, *, seed: int | None, lanes: int = LANES
    ) -> None:
        """Describe the windows; nothing is read yet.

        Args:
          documents: the items are of.
          items: at least 2 tokens of them, for a window to be.
          context: s, tokens a window gives to the model.
          seed: permutes the items anew in each epoch, as a pure function of (seed, epoch); with None they stay.
          lanes: read in turn; with 1, windows follow each other.
        """
        self._documents, self._items, self._context, self._seed = documents, items, context, seed
        self._tokens = items.tokens
        self.per_epoch = max(0, -(-(self._tokens - 1) // context))  # the last one may be padded
        self._lanes = max(1, min(lanes, self.per_epoch))
        self._epoch = functools.lru_cache(maxsize=_CACHED_EPOCHS)(self._order)

    def row(self, epoch: int, index: int) -> Row:
        """See `PackedRows.row`."""
        row = _RowBuilder(self._context + 1)
        for document, start, stop in self.parts(epoch, index):
            row.add(self._documents[document], start, stop)
        return {
            "tokens": row.tokens[:-1],
            "targets": row.tokens[1:],
            "segment_ids": row.segments[:-1],
            "positions": row.positions[:-1],
            "loss_mask": (row.segments[1:] == row.segments[:-1]) & (row.segments[1:] > 0) & row.loss_mask[1:],
        }

    def parts(self, epoch: int, index: int) -> list[DocumentPart]:
        """See `PackedRows.parts`."""
        order, ends = self._epoch(epoch)
        start = self._window(index) * self._context
        stop = min(start + self._context + 1, self._tokens)
        first, last = np.searchsorted(ends, [start, stop - 1], side="right")
        parts = []
        for place in range(first, last + 1):
            item = order[place]
            begin = ends[place] - self._items.length[item]  # of the item in the concatenation
            skip = self._items.start[item] - begin  # from a place in the concatenation to one in the document
            document = int(self._items.document[item])
            parts.append(DocumentPart(document, int(max(start, begin) + skip), int(min(stop, ends[place]) + skip)))
        return parts

    def after(self, epoch: int, rows: int) -> Items:
        """See `PackedRows.after`. Items that a read window's edge cuts are left with what is not read of them."""
        rounds, more = divmod(rows, self._lanes)
        edges = [self._lane(lane) for lane in range(self._lanes + 1)]
        runs: list[list[int]] = []  # windows in a row that are not read: the first, and the one after the last
        for lane, (begin, end) in enumerate(itertools.pairwise(edges)):
            unread = begin + rounds + (lane < more)
            if unread >= end:
                continue
            if runs and runs[-1][1] == unread:
                runs[-1][1] = end
            else:
                runs.append([unread, end])
        rest = self._items.take(np.zeros(0, np.int64))
        for first, last in runs:
            # The first token of a window is the last target of the one before: it was predicted.
            rest += self._between(epoch, first * self._context, min(last * self._context + 1, self._tokens))
        return rest

    def _window(self, index: int) -> int:
        """The window that row `index` is."""
        place, lane = divmod(index, self._lanes)  # the first lanes have a window more where they are not even
        return self._lane(lane) + place

    def _lane(self, lane: int) -> int:
        """The first window of a lane."""
        each, more = divmod(self.per_epoch, self._lanes)
        return lane * each + min(lane, more)

    def _between(self, epoch: int, start: int, stop: int) -> Items:
        """The items, or parts of them, that the tokens [start, stop) of an epoch's concatenation are."""
        order, ends = self._epoch(epoch)
        first, last = np.searchsorted(ends, [start, stop - 1], side="right")
        part = self._items.take(order[first : last + 1])
        before = start - (ends[first] - part.length[0])
        part.length[-1] -= ends[last] - stop
        part.start[0] += before
        part.length[0] -= before
        return part

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without the cached orders."""
        make = functools.partial(Windows, seed=self._seed, lanes=self._lanes)
        return make, (self._documents, self._items, self._context)

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's items in order, and where in its concatenation each ends: int64 [items] both."""
        order = permutation(len(self._items.length), self._seed, epoch)
        return order, np.cumsum(self._items.length[order])


class BinRows:
    """A row for each bin of whole items; every token of an item but the first is predicted once an epoch."""

    def __init__(self, documents: Documents, items: Items, bins: Bins, context: int, *, seed: int | None) -> None:
        """Describe the rows; nothing is read yet.

        Args:
          documents: the items are of.
          items: each of 2 to s + 1 tokens.
          bins: of their sizes, which are one less than their lengths.
          context: s, tokens a row.
          seed: permutes the bins anew in each epoch; with None they stay.
        """
        self._documents, self._items, self._bins = documents, items, bins
        self._context, self._seed = context, seed
        self.per_epoch = len(bins)
        self._epoch = functools.lru_cache(maxsize=_CACHED_EPOCHS)(self._order)

    def row(self, epoch: int, index: int) -> Row:
        """See `PackedRows.row`."""
        row = _RowBuilder(self._context)
        targets, mask = np.zeros((2, self._context), np.int32)
        for document, start, stop in self.parts(epoch, index):
            text = self._documents[document]
            place = slice(row.filled, row.filled + stop - start - 1)
            targets[place] = text.tokens[start + 1 : stop]
            mask[place] = True if text.loss_mask is None else text.loss_mask[start + 1 : stop]
            row.add(text, start, stop - 1)
        return {
            "tokens": row.tokens,
            "targets": targets,
            "segment_ids": row.segments,
            "positions": row.positions,
            "loss_mask": mask.astype(bool),
        }

    def parts(self, epoch: int, index: int) -> list[DocumentPart]:
        """See `PackedRows.parts`."""
        items = self._items.take(self._bins[int(self._epoch(epoch)[index])])
        return [DocumentPart(*map(int, part)) for part in zip(items.document, items.start, items.start + items.length,
                                                      strict=True)]  # fmt: skip

    def after(self, epoch: int, rows: int) -> Items:
        """See `PackedRows.after`."""
        bins, starts = self._epoch(epoch)[rows:], self._bins.starts
        sizes = starts[bins + 1] - starts[bins]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return self._items.take(self._bins.members[np.repeat(starts[bins], sizes) + within])

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without the cached orders."""
        return functools.partial(BinRows, seed=self._seed), (self._documents, self._items, self._bins, self._context)

    def _order(self, epoch: int) -> np.ndarray:
        return permutation(len(self._bins), self._seed, epoch)


def permutation(count: int, seed: int | None, epoch: int) -> np.ndarray:
    """An order of `count` things, int64 [count], a pure function of (seed, epoch); with no seed their own."""
    if seed is None:
        return np.arange(count)
    # Sorting raw bits: numpy promises their stream for good, which it does not for `permutation`.
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(bits, kind="stable")


class _RowBuilder:
    """Arrays of a row, filled from the left."""

    def __init__(self, size: int) -> None:
        self.tokens, self.segments, self.positions = np.zeros((3, size), np.int32)
        self.loss_mask = np.ones(size, bool)
        self.filled, self._segment = 0, 0

    def add(self, text: Text, start: int, stop: int) -> None:
        """Append the tokens [start, stop) of a document as the next segment."""
        place = slice(self.filled, self.filled + stop - start)
        self._segment += 1
        self.tokens[place] = text.tokens[start:stop]
        self.segments[place] = self._segment
        self.positions[place] = np.arange(stop - start)
        if text.loss_mask is not None:
            self.loss_mask[place] = text.loss_mask[start:stop]
        self.filled = place.stop
