"""Measure the peak memory of a block of code."""

import threading
from typing import Self

import psutil

_INTERVAL = 0.02  # seconds between two samples


class PeakMemory:
    """Measures the peak resident memory of this process in a `with` block.

    It samples every 20 ms, so shorter peaks may be missed.

    Attributes:
      bytes: peak resident memory inside the block.
      before: resident memory at its start.
    """

    def __init__(self) -> None:
        self._process, self._ended = psutil.Process(), threading.Event()

    def __enter__(self) -> Self:
        """Start sampling."""
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
