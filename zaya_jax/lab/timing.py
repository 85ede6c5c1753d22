"""Time calls. Nothing here imports jax, which would disturb a peer in its own process."""

import time
from collections.abc import Callable


def elapsed(work: Callable[[], object]) -> float:
    """Return the seconds of a call, which must wait for what it starts."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def timed(work: Callable[[], object], repeats: int, warm_up: int = 1) -> list[float]:
    """Return the seconds of each of `repeats` calls, after `warm_up` others."""
    return [elapsed(work) for _ in range(warm_up + repeats)][warm_up:]
