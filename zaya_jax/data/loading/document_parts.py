"""Items: documents or parts of them, the units of packing. Also counts what becomes of documents."""

from typing import NamedTuple, Self

import numpy as np

from zaya_jax.config.phases import OverLength


class Items(NamedTuple):
    """An ordered list of parts of documents; each field is int64 [items]."""

    document: np.ndarray  # index of the document
    start: np.ndarray  # first token of the item within the document
    length: np.ndarray  # number of tokens

    def take(self, chosen: np.ndarray) -> Self:
        """Select items by a mask or by indices, in that order."""
        return type(self)(self.document[chosen], self.start[chosen], self.length[chosen])

    def untrimmed(self, originals: "Items", most: int) -> Self:
        """Undo trimming to `most` tokens by restoring the lengths of `originals`."""
        if len(self.length) == 0 or len(originals.length) == 0:
            return self
        stride = int(max(originals.start.max(), self.start.max())) + 1
        keys = originals.document * stride + originals.start
        order = np.argsort(keys, kind="stable")
        next_keys = self.document * stride + self.start
        place = order[np.minimum(np.searchsorted(keys[order], next_keys), len(keys) - 1)]
        trimmed = (keys[place] == next_keys) & (self.length == most)
        return self._replace(length=np.where(trimmed, originals.length[place], self.length))

    def __add__(self, other: "Items") -> "Items":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Items(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


def whole_documents(lengths: np.ndarray) -> Items:
    """Return every document as one item, in order; `lengths`, integer [documents], are the tokens of each."""
    documents = np.arange(len(lengths))
    return Items(documents, np.zeros_like(documents), lengths.astype(np.int64))


class Fitted(NamedTuple):
    """Items after applying the policy for long ones."""

    used: Items
    dropped: Items  # another phase can still use them
    counts: dict[str, int]  # number of items 'split', 'trimmed', 'dropped', and too 'short' to predict a token


def fit(items: Items, context: int, over_length: OverLength, *, whole: bool) -> Fitted:
    """Apply the policy for items that are longer than a row of `context` tokens.

    An item of `context` + 1 tokens fits exactly, because its last token is only a target. 'split' cuts long items into
    rows, each starting with the last token of the previous one, so that every token is predicted once; 'trim' keeps the
    beginning; 'drop' removes the item. `whole` says whether items must fit in one row; windows split long items anyway.
    """
    most = context + 1
    is_long = items.length > most
    counts = {"split": 0, "trimmed": 0, "dropped": 0, "short": 0}
    used, dropped = items, items.take(np.zeros(0, np.int64))
    if over_length == "trim":
        used = items._replace(length=np.minimum(items.length, most))
        counts["trimmed"] = int(is_long.sum())
    elif over_length == "drop":
        used, dropped = items.take(~is_long), items.take(is_long)
        counts["dropped"] = int(is_long.sum())
    elif whole:
        used = _split(items, context)
        counts["split"] = int(is_long.sum())
    if whole:  # such an item predicts nothing on its own, while windows join it to its neighbours
        short = used.length < 2
        used, counts["short"] = used.take(~short), int(short.sum())
    return Fitted(used, dropped, counts)


def _split(items: Items, context: int) -> Items:
    pieces = np.maximum(-(-(items.length - 1) // context), 1)
    origin = np.repeat(np.arange(len(pieces)), pieces)
    place = np.arange(len(origin)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset, part = place * context, items.take(origin)
    return Items(part.document, part.start + offset, np.minimum(context + 1, part.length - offset))


_UNREAD, _TOO_SHORT, _TOO_LONG, _USED = range(4)  # what became of a document; the largest of all phases counts


class Use(NamedTuple):
    """The documents of a split: `documents` is the sum of the four numbers after it."""

    documents: int
    used: int  # at least one of their tokens is predicted
    too_long: int  # longer than a row, and left out for that
    too_short: int  # of a single token, which predicts nothing
    unread: int  # never reached
    trimmed: int  # documents that are cut to the length of a row
    read: float  # part of all their tokens that are predicted, at most 1


class Tally:
    """Adds up the use of the documents of a split over the phases that read it."""

    def __init__(self, documents: int) -> None:
        self._fates, self._trimmed = np.full(documents, _UNREAD, np.int8), 0

    def add(self, lengths: np.ndarray, left_out: Items, predicted: np.ndarray, trimmed: int) -> None:
        """Count a phase, which trims a number of documents.

        `lengths` are int64 [documents], tokens of each; `left_out` the documents that are too long; `predicted`, bool
        [documents] or indices, those of which a token is predicted.
        """
        fates = np.where(lengths == 1, _TOO_SHORT, _UNREAD).astype(np.int8)
        fates[left_out.document] = _TOO_LONG
        fates[predicted] = _USED
        self._fates, self._trimmed = np.maximum(self._fates, fates), max(self._trimmed, trimmed)

    def use(self, read: float) -> Use:
        """Return the counts; `read` is the part of the tokens that are predicted."""
        unread, short, long, used = map(int, np.bincount(self._fates, minlength=4))
        return Use(len(self._fates), used, long, short, unread, self._trimmed, min(1.0, read))
