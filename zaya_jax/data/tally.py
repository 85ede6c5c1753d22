"""Count which documents of a source are used, and which are left out, and why."""

from typing import NamedTuple, Self

import numpy as np

from zaya_jax.data.items import Items

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

    @classmethod
    def none(cls, documents: int) -> Self:
        """Return the use of documents that nothing reads."""
        return cls(documents, 0, 0, 0, documents, 0, 0.0)


class Tally:
    """Adds up the use of the documents of a split over the phases that read it."""

    def __init__(self, documents: int) -> None:
        """Start with documents of which none is read."""
        self._fates, self._trimmed = np.full(documents, _UNREAD, np.int8), 0

    def add(self, lengths: np.ndarray, left_out: Items, predicted: np.ndarray, trimmed: int) -> None:
        """Count a phase.

        Args:
          lengths: int64 [documents], tokens of each.
          left_out: the documents that are too long.
          predicted: bool [documents], or indices: those of which a token is predicted.
          trimmed: number of documents that are trimmed.
        """
        fates = np.where(lengths == 1, _TOO_SHORT, _UNREAD).astype(np.int8)
        fates[left_out.document] = _TOO_LONG
        fates[predicted] = _USED
        self._fates, self._trimmed = np.maximum(self._fates, fates), max(self._trimmed, trimmed)

    def use(self, read: float) -> Use:
        """Return the counts; `read` is the part of the tokens that are predicted."""
        unread, short, long, used = map(int, np.bincount(self._fates, minlength=4))
        return Use(len(self._fates), used, long, short, unread, self._trimmed, min(1.0, read))
