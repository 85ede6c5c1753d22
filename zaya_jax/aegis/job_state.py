"""State that the attempts of a supervisor share."""

import signal
import time
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from zaya_jax.aegis.events import EventLog
from zaya_jax.aegis.file_worker import FileWorker
from zaya_jax.aegis.notify import Notifier
from zaya_jax.aegis.output import Output
from zaya_jax.aegis.policy import Policy
from zaya_jax.aegis.timeouts import Timeouts

_ONE_REQUEST = 1.0  # seconds in which several SIGTERM or SIGHUP are one request: schedulers may send both, or one twice


class Detected(NamedTuple):
    """A failure from which the job has not recovered."""

    event: int  # id of the event
    time: float  # of the detection, of `time.monotonic`
    attempt: int  # in which it happened


class JobState:
    """Event log, output, requests to stop, and the progress of training."""

    def __init__(self, folder: Path, node: str, policy: Policy, timeouts: Timeouts) -> None:
        self.folder, self.policy = folder, policy  # of the supervisor
        self.timeouts = timeouts  # of the phases, as learned so far
        self.notifier = Notifier(policy.notify)  # tells people of severe events
        self.files = FileWorker()  # reads and writes what is in the run folder
        self.log = EventLog(folder, node, self.files, self.notifier.send)
        self.outputs = Output(1), Output(2)
        self.signals: list[int] = []  # numbers of those that asked to stop, one for each request
        self._signalled = 0.0  # when the last request came
        self.detected: Detected | None = None  # the failure that is not recovered from
        self.best_step = -1  # greatest number of steps done; -1 before the first

    def detect(self, event: int) -> None:
        """Note that this attempt failed, as `event` says."""
        self.detected = Detected(event, time.monotonic(), self.log.attempt)

    @property
    def has_failed(self) -> bool:
        """True if a failure of this attempt was detected."""
        return self.detected is not None and self.detected.attempt == self.log.attempt

    @property
    def cause(self) -> int | None:
        """The event of the failure that is not recovered from."""
        return None if self.detected is None else self.detected.event

    def note_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Note that a signal asks to stop. Ctrl-C is a request each time, since a person presses it."""
        now = time.monotonic()
        if number == signal.SIGINT or not self.signals or now - self._signalled > _ONE_REQUEST:
            self.signals.append(number)
            self._signalled = now
