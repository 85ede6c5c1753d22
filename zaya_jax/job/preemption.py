"""Preemption: Ctrl-C, SIGTERM or SIGHUP makes all processes of a job save and exit after the same step."""

import os
import signal
from types import FrameType

from zaya_jax.job.stop_step import StopStep
from zaya_jax.run.signals import NAMES, Listener, warn


class Preemption(Listener):
    """Turns the first Ctrl-C, SIGTERM or SIGHUP in a `with` block, once `arm`ed, into a request to save and exit.

    Before that, and from the second signal on, the process exits at once, as it would without this class. A signal to
    any process of a job makes all save and exit, as agreed through `stop_step`.

    Under a supervisor, which kills a trainer that must not finish, later signals change nothing: a scheduler may signal
    both, and the supervisor passes its own on, so a second one is no second request.
    """

    def __init__(self, stop_step: StopStep | None = None, *, is_supervised: bool = False) -> None:
        super().__init__(self._announce, self._handle_signal)
        self._stop_step, self._is_supervised = stop_step, is_supervised
        self._armed = self._announced = False
        self.number: int | None = None  # of the signal that this process itself received

    def arm(self) -> None:
        """Start to save on a signal, since now there is something to save."""
        self._armed = True

    def reached(self) -> bool:
        """True if the run must save and exit now; all processes must call it equally often."""
        return self.number is not None if self._stop_step is None else self._stop_step.reached()

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread, between two of its instructions."""
        if self._armed and self.number is None:
            self.number = number
        elif self._armed and self._is_supervised:
            return
        elif not self.nested:
            before = self.before.get(number)
            if callable(before):
                before(number, frame)
            else:
                signal.signal(number, signal.SIG_DFL)
                os.kill(os.getpid(), number)

    def _announce(self, number: int) -> None:
        """Print that the run will save, and tell the others, from a thread, without waiting for the main one."""
        if self._armed and not self._announced:
            self._announced = True
            if self._stop_step is not None:
                self._stop_step.request()
            more = "" if self._is_supervised else f" Another {NAMES[number]} exits at once."
            warn(f"{NAMES[number]}: saving after this step, then exiting.{more}")
        elif not (self._armed and self._is_supervised):
            self.pass_on(number)
