"""The memory that a piece of work takes."""

import threading
from typing import Self

import psutil

_INTERVAL = 0.02  # seconds between two samples


class PeakMemory:
    """The most resident memory during a `with` block: `bytes`, and `before` it.

    It is sampled: a peak of a few milliseconds may be missed. With `children` it is the sum over this process and those
    below it, in which what several share counts several times.
    """

    def __init__(self, *, children: bool = True) -> None:
        self._process, self._children, self._ended = psutil.Process(), children, threading.Event()

    def __enter__(self) -> Self:
        """Start to sample."""
        self.bytes = self.before = self._resident()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Take the last sample."""
        self._ended.set()
        self._thread.join()
        self.bytes = max(self.bytes, self._resident())

    def _sample(self) -> None:
        while not self._ended.wait(_INTERVAL):
            self.bytes = max(self.bytes, self._resident())

    def _resident(self) -> int:
        total = 0
        for process in [self._process, *(self._process.children(recursive=True) if self._children else ())]:
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:  # it ended between the two calls
                continue
        return total
