"""State that the attempts of a supervisor share."""

import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from zaya_jax.aegis.events import EventLog
from zaya_jax.aegis.file_worker import FileWorker
from zaya_jax.aegis.leader import LEADER
from zaya_jax.aegis.member import Member
from zaya_jax.aegis.notify import Notifier
from zaya_jax.aegis.output import Output
from zaya_jax.aegis.policy import Policy
from zaya_jax.aegis.state import write_state
from zaya_jax.aegis.timeouts import Timeouts

_STATE_EVERY = 1.0  # seconds
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
        self.member: Member | None = None  # of a job of several nodes
        self._state: Future[None] | None = None  # the last `state.json`, which may not be written yet
        self._state_time = 0.0

    def detect(self, event: int) -> None:
        """Note that this attempt failed, as `event` says."""
        self.detected = Detected(event, time.monotonic(), self.log.attempt)

    @property
    def must_end(self) -> bool:
        """True if the supervisor is to end, as a signal asks or the job of several nodes has."""
        return bool(self.signals) or (self.member is not None and self.member.ended is not None)

    @property
    def job_cause(self) -> dict[str, Any]:
        """The fields of an event that follows from the newest one in the log of a job of several nodes."""
        event = None if self.member is None else self.member.order.event
        return {} if event is None else {"cause": event, "cause_node": LEADER}

    @property
    def has_failed(self) -> bool:
        """True if a failure of this attempt was detected."""
        return self.detected is not None and self.detected.attempt == self.log.attempt

    @property
    def cause(self) -> int | None:
        """The event of the failure that is not recovered from."""
        return None if self.detected is None else self.detected.event

    def keep_files(self, now: float, ranks: Callable[[], list[dict[str, Any]]] = list) -> None:
        """Write the state, and what waits for a disk or a command, once a second; `ranks` describes the processes."""
        if now - self._state_time < _STATE_EVERY or not (self._state is None or self._state.done()):
            return
        self._state_time = now
        self.notifier.poll()
        self.log.flush()
        state = {"attempt": self.log.attempt, "state": "running", "ranks": ranks()}
        self._state = self.files.submit(lambda: write_state(self.folder, **state))

    def note_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Note that a signal asks to stop. Ctrl-C is a request each time, since a person presses it."""
        now = time.monotonic()
        if number == signal.SIGINT or not self.signals or now - self._signalled > _ONE_REQUEST:
            self.signals.append(number)
            self._signalled = now
