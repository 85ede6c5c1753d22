"""The memory that a piece of work takes."""

import threading
from typing import Self

import psutil

_INTERVAL = 0.02  # seconds between two samples


class PeakMemory:
    """The most resident memory of this process during a `with` block: `bytes`, and `before` it.

    It is sampled: a peak of a few milliseconds may be missed.
    """

    def __init__(self) -> None:
        self._process, self._ended = psutil.Process(), threading.Event()

    def __enter__(self) -> Self:
        """Start to sample."""
        self.bytes = self.before = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the last sample."""
        self._ended.set()
        self._thread.join()

    def _sample(self) -> None:
        ended = False
        while not ended:
            ended = self._ended.wait(_INTERVAL)
            self.bytes = max(self.bytes, self._process.memory_info().rss)
