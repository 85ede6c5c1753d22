"""The memory that a piece of work takes, with all the processes it starts."""

import threading
from collections.abc import Callable
from typing import Any

import psutil

_LOOK_EVERY = 0.02  # seconds


def peak_memory(work: Callable[[], Any]) -> int:
    """Do `work`, and return the most resident memory, in bytes, that this process and those below it held meanwhile.

    It is the sum over the processes, looked at now and then: what several share counts several times, and a
    peak of a few milliseconds may be missed.
    """
    peak, over = _resident(), threading.Event()

    def watch() -> None:
        nonlocal peak
        while not over.wait(_LOOK_EVERY):
            peak = max(peak, _resident())

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        work()
    finally:
        over.set()
        thread.join()
    return max(peak, _resident())


def _resident() -> int:
    total, own = 0, psutil.Process()
    for process in [own, *own.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:  # it ended between the two calls
            continue
    return total
