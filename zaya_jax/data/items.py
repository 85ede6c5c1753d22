"""Items, the parts of documents that packing works with."""

from typing import NamedTuple, Self

import numpy as np

from zaya_jax.config.phases import OverLength


class Items(NamedTuple):
    """Parts of documents, in an order; int64 [items] each."""

    document: np.ndarray  # index of the document
    start: np.ndarray  # its first token that belongs to the item
    length: np.ndarray  # tokens of the item

    @property
    def tokens(self) -> int:
        """Tokens of all items."""
        return int(self.length.sum())

    def take(self, chosen: np.ndarray) -> Self:
        """The items that `chosen` selects, a mask or indices, in its order."""
        return type(self)(self.document[chosen], self.start[chosen], self.length[chosen])

    def untrimmed(self, originals: "Items", most: int) -> Self:
        """These items with the lengths of those `originals` that were trimmed to them, to `most` tokens."""
        if len(self.length) == 0 or len(originals.length) == 0:
            return self
        stride = int(max(originals.start.max(), self.start.max())) + 1
        keys = originals.document * stride + originals.start
        order = np.argsort(keys, kind="stable")
        wanted = self.document * stride + self.start
        place = order[np.minimum(np.searchsorted(keys[order], wanted), len(keys) - 1)]
        trimmed = (keys[place] == wanted) & (self.length == most)
        return self._replace(length=np.where(trimmed, originals.length[place], self.length))

    def __add__(self, other: "Items") -> "Items":  # pyright: ignore[reportIncompatibleMethodOverride]
        """The items of both, one after the other."""
        return Items(*(np.concatenate(pair) for pair in zip(self, other, strict=True)))


def whole_documents(lengths: np.ndarray) -> Items:
    """Every document, in order.

    Args:
      lengths: int64 [documents], tokens of each.
    """
    documents = np.arange(len(lengths))
    return Items(documents, np.zeros_like(documents), lengths.astype(np.int64))


class Fitted(NamedTuple):
    """Items once the policy for those that are too long was applied."""

    used: Items
    dropped: Items  # left out whole; another phase may take them
    counts: dict[str, int]  # documents 'split', 'trimmed', 'dropped', and too 'short' to predict a token


def fit(items: Items, context: int, over_length: OverLength, *, whole: bool) -> Fitted:
    """Apply the policy for items that are longer than a row.

    A row of `context` tokens predicts that many, so an item of `context` + 1 tokens just fits: its last token is
    predicted and predicts nothing.

    Args:
      items: to be packed.
      context: tokens a row.
      over_length: 'split' cuts what is too long into rows, each beginning with the last token of the one before, so
        that every token is predicted once; 'trim' keeps its beginning; 'drop' leaves it out.
      whole: whether items must lie in one row; windows split what is too long by themselves.
    """
    most = context + 1
    long = items.length > most
    counts = {"split": 0, "trimmed": 0, "dropped": 0, "short": 0}
    used, dropped = items, items.take(np.zeros(0, np.int64))
    if over_length == "trim":
        used = items._replace(length=np.minimum(items.length, most))
        counts["trimmed"] = int(long.sum())
    elif over_length == "drop":
        used, dropped = items.take(~long), items.take(long)
        counts["dropped"] = int(long.sum())
    elif whole:
        used = _split(items, context)
        counts["split"] = int(long.sum())
    if whole:  # a window joins such an item to its neighbours, a row of whole items has no use for it
        short = used.length < 2
        used, counts["short"] = used.take(~short), int(short.sum())
    return Fitted(used, dropped, counts)


def _split(items: Items, context: int) -> Items:
    pieces = np.maximum(-(-(items.length - 1) // context), 1)
    origin = np.repeat(np.arange(len(pieces)), pieces)
    place = np.arange(len(origin)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offset = place * context
    return Items(
        items.document[origin], items.start[origin] + offset, np.minimum(context + 1, items.length[origin] - offset)
    )
