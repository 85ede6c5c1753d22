"""The request to end (SIGTERM), which all processes of a job heed after the same step."""

import signal
import threading
from types import FrameType
from typing import Any, Self

import jax
from jax.experimental import multihost_utils


class Preemption:
    """Takes SIGTERM for a request to save and end, inside a `with` block.

    In a job of several processes jax's preemption service takes the signal, whichever process gets it, and agrees with
    the others on the poll that heeds it. A second signal ends a process that is alone at once.
    """

    def __init__(self) -> None:
        self._asked, self._polls = False, 0
        self._before: Any = None
        # Only the main thread may set handlers: in any other, as a notebook's, the signal does what it did before.
        self._handles = jax.process_count() == 1 and threading.current_thread() is threading.main_thread()

    def __enter__(self) -> Self:
        """Begin to listen."""
        if self._handles:
            self._before = signal.signal(signal.SIGTERM, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the signal to whoever had it before."""
        if self._handles:
            signal.signal(signal.SIGTERM, self._before)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._asked = True
        signal.signal(signal.SIGTERM, self._before)

    def reached(self) -> bool:
        """Whether the run is to save and end now; called equally often by all processes."""
        if jax.process_count() == 1:
            return self._asked
        self._polls += 1
        return self._asked or self._heeded()

    def _heeded(self) -> bool:
        # True at one poll alone, so that it is remembered.
        self._asked = multihost_utils.reached_preemption_sync_point(self._polls)
        return self._asked
