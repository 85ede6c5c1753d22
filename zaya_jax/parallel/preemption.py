"""The request to end (Ctrl-C or SIGTERM), which all processes of a job heed after the same step."""

import os
import signal
from types import FrameType

import jax
from jax.experimental import multihost_utils

from zaya_jax.run.signals import NAMES, Listener, exit_status, warn


class Preemption(Listener):
    """Takes a first Ctrl-C or SIGTERM for a request to save and end, inside a `with` block and once it is `arm`ed.

    Before that, and from the second signal on, the process ends as it would without it: at once.
    In a job of several processes jax's preemption service takes SIGTERM, whichever process gets it, and agrees with
    the others on the poll that heeds it; Ctrl-C is handed to it as SIGTERM.
    """

    def __init__(self) -> None:
        self._several = jax.process_count() > 1
        numbers = (int(signal.SIGINT),) if self._several else tuple(NAMES)
        super().__init__(self._announce, self._handle_signal, numbers)
        self._armed = self._announced = self._reached = False
        self._number: int | None = None
        self._polls = 0

    def arm(self) -> None:
        """From now on there is something to save."""
        self._armed = True

    def reached(self) -> bool:
        """Whether the run is to save and end now; called equally often by all processes."""
        if not self._several:
            return self._number is not None
        self._polls += 1
        # True at one poll alone, so that it is remembered.
        self._reached = self._reached or multihost_utils.reached_preemption_sync_point(self._polls)
        return self._reached

    @property
    def signalled(self) -> bool:
        """Whether this process itself was asked to end."""
        return self._number is not None

    @property
    def name(self) -> str:
        """Of the signal: 'Ctrl-C' or 'SIGTERM'."""
        return NAMES[self._number or signal.SIGTERM]

    @property
    def status(self) -> int:
        """The exit status of a process that ends for it."""
        return exit_status(self._number or signal.SIGTERM)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """In the main thread, before its next instruction."""
        if self._armed and self._number is None:
            self._number = number
            if self._several:
                os.kill(os.getpid(), signal.SIGTERM)
        elif not self.nested:
            before = self.before.get(number)
            if callable(before):
                before(number, frame)
            else:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

    def _announce(self, number: int) -> None:
        """In a thread, at once."""
        if self._armed and not self._announced:
            self._announced = True
            warn(f"{NAMES[number]}: saving after this step, then exiting. Another {NAMES[number]} exits at once.")
        else:
            self.pass_on(number)
