"""Windows over a permuted concatenation of documents, each found by its index alone.

A window of s + 1 tokens gives s predictions; neighbours share one token, so an epoch predicts each token of
the concatenation but the first once. Nothing is carried from one window to the next: any window can be read
first, by any process, and a run resumes by knowing one number.
"""

import functools

import numpy as np

from zaya_jax.data.shards import Documents
from zaya_jax.data.tokenizer import EOT

Example = dict[str, np.ndarray]

_EPOCHS_KEPT = 2  # orders in memory: prefetching threads work on both sides of an epoch's end


class Windows:
    """A random-access source for Grain: `len()` and `[index]`. Safe to read from several threads; picklable."""

    def __init__(self, documents: Documents, context: int, *, seed: int | None, count: int | None = None) -> None:
        """Describe the windows; nothing is read yet.

        Args:
          documents: of one split.
          context: s, tokens a window gives to the model.
          seed: permutes the documents anew in each epoch, as a pure function of (seed, epoch); with None they
            stay in their order.
          count: number of windows, through as many epochs as it takes; by default one epoch.
        """
        self._documents = documents
        self._context = context
        self._seed = seed
        self._tokens = int(documents.lengths.sum())
        self.per_epoch = -(-(self._tokens - 1) // context)  # windows; the last one may be padded
        self._count = self.per_epoch if count is None else count
        self._epoch = functools.lru_cache(maxsize=_EPOCHS_KEPT)(self._order)

    def __len__(self) -> int:
        """Number of windows."""
        return self._count

    def __getitem__(self, index: int) -> Example:
        """One window.

        Returns:
          Arrays of shape [s]. `tokens` and `targets` int32: what the model sees and what follows it.
          `segment_ids` int32: 1, 2, 3, … for the documents in the window, 0 for padding. `loss_mask` bool:
          true where the target is of the same document as the token, hence no padding either.

        Raises:
          IndexError: `index` is not in [0, len).
        """
        if not 0 <= index < self._count:
            raise IndexError(f"Window {index} is not among the {self._count} windows.")
        epoch, window = divmod(int(index), self.per_epoch)
        tokens = np.full(self._context + 1, EOT, np.int32)
        segments = np.zeros(self._context + 1, np.int32)
        filled = 0
        for segment, part in enumerate(self._parts(epoch, window * self._context), start=1):
            tokens[filled : filled + len(part)] = part
            segments[filled : filled + len(part)] = segment
            filled += len(part)
        return {
            "tokens": tokens[:-1],
            "targets": tokens[1:],
            "segment_ids": segments[:-1],
            "loss_mask": (segments[1:] == segments[:-1]) & (segments[1:] > 0),
        }

    def __reduce__(self) -> tuple[object, ...]:
        """The orders kept in memory do not travel to another process."""
        return _rebuild, (self._documents, self._context, self._seed, self._count)

    def _parts(self, epoch: int, start: int) -> list[np.ndarray]:
        """Up to s + 1 tokens from `start` of the epoch's concatenation on, cut at the ends of documents."""
        order, ends = self._epoch(epoch)
        stop = min(start + self._context + 1, self._tokens)
        first, last = np.searchsorted(ends, [start, stop - 1], side="right")
        parts = []
        for place in range(first, last + 1):
            document = self._documents[order[place]]
            begin = ends[place] - len(document)
            parts.append(document[max(start - begin, 0) : stop - begin])
        return parts

    def _order(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The epoch's documents in order, and where in its concatenation each ends: int64 [documents] both."""
        lengths = self._documents.lengths
        order = np.arange(len(lengths))
        if self._seed is not None:
            # Sorting raw bits: numpy promises their stream for good, which it does not for `permutation`.
            bits = np.random.PCG64(np.random.SeedSequence([self._seed, epoch])).random_raw(len(lengths))
            order = np.argsort(bits, kind="stable")
        return order, np.cumsum(lengths[order])


def _rebuild(documents: Documents, context: int, seed: int | None, count: int) -> Windows:
    return Windows(documents, context, seed=seed, count=count)
