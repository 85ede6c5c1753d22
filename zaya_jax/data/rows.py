"""Pack items into rows of a fixed length. Each row is a function of its index.

No state is carried between rows, so any process can build any row, and a run resumes from a row index.
"""

import functools
import itertools
from typing import NamedTuple, Protocol

import numpy as np

from zaya_jax.data.bins import Bins
from zaya_jax.data.items import Items
from zaya_jax.data.shards import Documents, Text

Row = dict[str, np.ndarray]

LANES = 64  # parts of the concatenation from which windows are read in turn

_CACHED_EPOCHS = 2  # orders kept in memory, since prefetching threads can work on two epochs at once


class DocumentPart(NamedTuple):
    """The tokens [start, stop) of a document."""

    document: int
    start: int
    stop: int


class PackedRows(Protocol):
    """Items packed into rows, whose order differs from epoch to epoch."""

    @property
    def per_epoch(self) -> int:
        """Number of rows per epoch."""
        ...

    def row(self, epoch: int, index: int) -> Row:
        """Return row `index` of an epoch.

        Returns:
          Arrays of shape [s]. `tokens` int32: input token ids. `targets` int32: the next token of each.
          `segment_ids` int32: 1, 2, 3, … for the items in the row, 0 for padding. `positions` int32: from 0 in each
          item. `loss_mask` bool: whether the loss covers the target, which must belong to the same item as the token.
        """
        ...

    def parts(self, epoch: int, index: int) -> list[DocumentPart]:
        """Return the parts of documents in row `index` of an epoch; the first token of each is not a target."""
        ...

    def after(self, epoch: int, rows: int) -> Items:
        """Return the items that remain unread after the first `rows` rows of an epoch, in reading order."""
        ...


class Windows:
    """Windows of s + 1 tokens over the concatenation of all items. Neighbouring windows share one token.

    An epoch predicts each token of the concatenation once, except the first. The concatenation is cut into lanes of
    equally many windows, and rows are read from the lanes in turn. Otherwise the rows of a batch would often come from
    a single document.
    """

    def __init__(
        self, documents: Documents, items: Items, context: int, *, seed: int | None, lanes: int = LANES
    ) -> None:
        """Define the windows without reading any document.

        Args:
          documents: the documents that the items refer to.
          items: the items to pack; fewer than 2 tokens in total give no window.
          context: s, input tokens per window.
          seed: shuffles the items of each epoch, as a pure function of (seed, epoch); None keeps their order.
          lanes: number of lanes that are read in turn; with 1, windows are read from the first to the last.
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
            begin = ends[place] - self._items.length[item]  # start of the item in the concatenation
            skip = self._items.start[item] - begin  # offset from the concatenation to the document
            document = int(self._items.document[item])
            parts.append(DocumentPart(document, int(max(start, begin) + skip), int(min(stop, ends[place]) + skip)))
        return parts

    def after(self, epoch: int, rows: int) -> Items:
        """See `PackedRows.after`. Of an item that was read in part, the unread part remains."""
        rounds, more = divmod(rows, self._lanes)
        edges = [self._lane(lane) for lane in range(self._lanes + 1)]
        runs: list[list[int]] = []  # [first, stop) of each run of consecutive unread windows
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
            # The first token of a window was already predicted: it is the last target of the window before.
            rest += self._between(epoch, first * self._context, min(last * self._context + 1, self._tokens))
        return rest

    def _window(self, index: int) -> int:
        """Return the index of the window of row `index`."""
        place, lane = divmod(index, self._lanes)  # if lanes are uneven, the first ones have one window more
        return self._lane(lane) + place

    def _lane(self, lane: int) -> int:
        """Return the index of the first window of a lane."""
        each, more = divmod(self.per_epoch, self._lanes)
        return lane * each + min(lane, more)

    def _between(self, epoch: int, start: int, stop: int) -> Items:
        """Return the items and parts of items in the tokens [start, stop) of an epoch's concatenation."""
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
        """Return the order of the epoch's items and the end of each in the concatenation, both int64 [items]."""
        order = permutation(len(self._items.length), self._seed, epoch)
        return order, np.cumsum(self._items.length[order])


class BinRows:
    """One row per bin of whole items. An epoch predicts each token of an item once, except its first."""

    def __init__(self, documents: Documents, items: Items, bins: Bins, context: int, *, seed: int | None) -> None:
        """Define the rows without reading any document.

        Args:
          documents: the documents that the items refer to.
          items: the items to pack, each of 2 to s + 1 tokens.
          bins: packing of the items, each of which takes its length minus 1.
          context: s, tokens per row.
          seed: shuffles the bins of each epoch; None keeps their order.
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
        return [
            DocumentPart(*map(int, part))
            for part in zip(items.document, items.start, items.start + items.length, strict=True)
        ]

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
    """Return a permutation, int64 [count], as a pure function of (seed, epoch); the identity if `seed` is None."""
    if seed is None:
        return np.arange(count)
    # Sort raw bits: numpy guarantees their stream across versions, but not that of `Generator.permutation`.
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(bits, kind="stable")


class _RowBuilder:
    """Builds the arrays of a row from left to right."""

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
