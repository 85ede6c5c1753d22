"""Pack items into rows of a fixed length. Each row is a function of its index, so any process can build any row."""

import abc
import functools
import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from zaya_jax.data.loading.bin_packing import Bins
from zaya_jax.data.loading.document_parts import Items
from zaya_jax.data.prepare.shards import Documents, Text

Row = dict[str, np.ndarray]

LANES = 64  # parts of the concatenation from which windows are read in turn

_ARRAYS = ("tokens", "targets", "segment_ids", "positions", "loss_mask")  # of a row, see `Windows.row`
_CACHED_EPOCHS = 2  # orders kept in memory, since prefetching threads can work on two epochs at once


class DocumentPart(NamedTuple):
    """The tokens [start, stop) of a document."""

    document: int
    start: int
    stop: int


class _PackedRows(abc.ABC):
    """Items packed into rows, whose order differs from epoch to epoch. No document is read before a row is."""

    per_epoch: int  # rows

    def __init__(self, documents: Documents, items: Items, context: int, seed: int | None) -> None:
        """Define the rows of s = `context` tokens; `seed` shuffles each epoch, None keeps the order of the items."""
        self._documents, self._items, self._context, self._seed = documents, items, context, seed
        self._epoch = functools.lru_cache(maxsize=_CACHED_EPOCHS)(self._order)

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the cached orders."""
        return {name: value for name, value in vars(self).items() if name != "_epoch"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._epoch = functools.lru_cache(maxsize=_CACHED_EPOCHS)(self._order)

    @abc.abstractmethod
    def _order(self, epoch: int) -> Any:
        """Return the order of an epoch's rows, which `_epoch` caches."""

    def _read(self, parts: Iterable[DocumentPart]) -> list[tuple[Text, int, int]]:
        return [(self._documents[document], start, stop) for document, start, stop in parts]

    @staticmethod
    def _fill(parts: Iterable[tuple[Text, int, int]], size: int) -> tuple[np.ndarray, ...]:
        """Return the tokens, segments, positions and loss mask of `size` tokens, filled with parts from the left."""
        tokens, segments, positions = np.zeros((3, size), np.int32)
        loss_mask, filled = np.ones(size, bool), 0
        for segment, (text, start, stop) in enumerate(parts, 1):
            place = slice(filled, filled + stop - start)
            tokens[place] = text.tokens[start:stop]
            segments[place] = segment
            positions[place] = np.arange(stop - start)
            if text.loss_mask is not None:
                loss_mask[place] = text.loss_mask[start:stop]
            filled = place.stop
        return tokens, segments, positions, loss_mask


class Windows(_PackedRows):
    """Windows of s + 1 tokens over the concatenation of all items. Neighbouring windows share one token.

    An epoch predicts each token of the concatenation once, except the first. Rows are read in turn from lanes of
    equally many windows; otherwise the rows of a batch would often come from a single document.
    """

    def __init__(
        self, documents: Documents, items: Items, context: int, *, seed: int | None, lanes: int = LANES
    ) -> None:
        """Define the windows; items with fewer than 2 tokens in total give none."""
        super().__init__(documents, items, context, seed)
        self._tokens = int(items.length.sum())
        self.per_epoch = max(0, -(-(self._tokens - 1) // context))  # the last one may be padded
        self._lanes = max(1, min(lanes, self.per_epoch))

    def row(self, epoch: int, index: int) -> Row:
        """Return row `index` of an epoch: arrays of shape [s].

        `tokens` int32: input token ids. `targets` int32: the next token of each. `segment_ids` int32: 1, 2, 3, … for
        the items in the row, 0 for padding. `positions` int32: from 0 in each item. `loss_mask` bool: whether the loss
        covers the target, which must belong to the same item as the token.
        """
        tokens, segments, positions, mask = self._fill(self._read(self.parts(epoch, index)), self._context + 1)
        continues = (segments[1:] == segments[:-1]) & (segments[1:] > 0)
        arrays = tokens[:-1], tokens[1:], segments[:-1], positions[:-1], continues & mask[1:]
        return dict(zip(_ARRAYS, arrays, strict=True))

    def parts(self, epoch: int, index: int) -> list[DocumentPart]:
        """Return the parts of documents in row `index` of an epoch; the first token of each is not a target."""
        start = self._window(index) * self._context
        items = self._between(epoch, start, min(start + self._context + 1, self._tokens))
        return _parts(items)

    def after(self, epoch: int, rows: int) -> Items:
        """Return the items, and parts of items, that the first `rows` rows of an epoch leave unread, in order."""
        rounds, more = divmod(rows, self._lanes)
        runs: list[list[int]] = []  # [first, stop) of each run of consecutive unread windows
        for lane, (begin, end) in enumerate(itertools.pairwise(map(self._lane, range(self._lanes + 1)))):
            unread = begin + rounds + (lane < more)
            if unread < end and runs and runs[-1][1] == unread:
                runs[-1][1] = end
            elif unread < end:
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

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the order of the epoch's items and the end of each in the concatenation, both int64 [items]."""
        order = permutation(len(self._items.length), self._seed, epoch)
        return order, np.cumsum(self._items.length[order])


class BinRows(_PackedRows):
    """One row per bin of whole items. An epoch predicts each token of an item once, except its first."""

    def __init__(self, documents: Documents, items: Items, bins: Bins, context: int, *, seed: int | None) -> None:
        """Define the rows of a packing of items of 2 to s + 1 tokens, each of which takes its length minus 1."""
        super().__init__(documents, items, context, seed)
        self._bins, self.per_epoch = bins, len(bins)

    def row(self, epoch: int, index: int) -> Row:
        """See `Windows.row`."""
        texts = self._read(self.parts(epoch, index))
        tokens, segments, positions, _ = self._fill(((t, start, stop - 1) for t, start, stop in texts), self._context)
        targets, _, _, mask = self._fill(((t, start + 1, stop) for t, start, stop in texts), self._context)
        return dict(zip(_ARRAYS, (tokens, targets, segments, positions, mask & (segments > 0)), strict=True))

    def parts(self, epoch: int, index: int) -> list[DocumentPart]:
        """See `Windows.parts`."""
        return _parts(self._items.take(self._bins[int(self._epoch(epoch)[index])]))

    def after(self, epoch: int, rows: int) -> Items:
        """See `Windows.after`."""
        bins, starts = self._epoch(epoch)[rows:], self._bins.starts
        sizes = starts[bins + 1] - starts[bins]
        within = np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        return self._items.take(self._bins.members[np.repeat(starts[bins], sizes) + within])

    def _order(self, epoch: int) -> np.ndarray:
        return permutation(len(self._bins), self._seed, epoch)


PackedRows = Windows | BinRows


def _parts(items: Items) -> list[DocumentPart]:
    return [DocumentPart(d, start, start + length) for d, start, length in np.transpose(items).tolist()]


def permutation(count: int, seed: int | None, epoch: int) -> np.ndarray:
    """Return a permutation, int64 [count], as a pure function of (seed, epoch); the identity if `seed` is None."""
    if seed is None:
        return np.arange(count)
    # Sort raw bits: numpy guarantees their stream across versions, but not that of `Generator.permutation`.
    bits = np.random.PCG64(np.random.SeedSequence([seed, epoch])).random_raw(count)
    return np.argsort(bits, kind="stable")
