"""The leader of a multi-node job: a separate process on node 0, restarted by the supervisor there.

`python -m zaya_jax.aegis.leader JSON`, with the arguments of `Leader` and listening sockets that it inherits.
"""

import contextlib
import dataclasses
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, cast

from zaya_jax.aegis.events import EventLog
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.failure import Severity
from zaya_jax.aegis.file_worker import FileWorker
from zaya_jax.aegis.roster import Order, Report, Roster
from zaya_jax.aegis.secure_channel import SecureChannel
from zaya_jax.aegis.state import STATE, read_fields, write_state
from zaya_jax.errors import InputError, Reason
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.fencing import newest_job
from zaya_jax.run.files import locked
from zaya_jax.run.handshake import Strangers
from zaya_jax.run.job_secret import VARIABLE
from zaya_jax.run.peer import Peer
from zaya_jax.run.signals import NAMES, warn

LEADER = "leader"  # its name in events
BEAT = 0.5  # seconds between two messages to a member, and from it
SILENT = 4.0  # seconds without a message after which a node is lost; a busy machine delays a thread by less
_TICK = 0.05  # seconds between two decisions: their work grows with the nodes, and each node sends twice a second
_PATIENCE = 10.0  # seconds that a proof may take
_END_SECONDS = 5.0  # that members may take to read how the job ended
_STATE_EVERY = 1.0  # seconds
_FROZEN = 10.0  # seconds without a new state of another job's leader after which the log is not left to it
_MOST_IDS = 1000  # events that a leader of another job may still write


@dataclasses.dataclass
class _Connection:
    """The connection to a member."""

    channel: SecureChannel
    index: int
    last_seen: float  # when the last message came
    sent: float = 0.0  # when the last one was sent
    order: Order | None = None  # what was sent


class Setup(NamedTuple):
    """The job, as its supervisor describes it to a leader."""

    folder: str  # of its log and state
    job: Mapping[str, Any]  # what all supervisors have in common: `nodes`, `spares`, …
    patience: float  # seconds to wait for missing nodes; then one of the job's `smaller` numbers will do
    name: str  # of the job in its own fencing tokens


class Leader:
    """Keeps a connection to each member, and tells the `Roster` what happens to it; `run` returns at the job's end."""

    def __init__(self, listeners: Sequence[socket.socket], secret: str, setup: Setup) -> None:
        """Listen to the supervisors of a job."""
        self._setup, self._folder = setup, (folder := Path(setup.folder))
        self._files, self._log_lock = FileWorker(), contextlib.ExitStack()
        self._log = EventLog(folder, LEADER, self._files, gap=_MOST_IDS)
        self._roster = Roster(setup.job, self._log.attempt, setup.patience, self._write)
        self._files.submit(self._take_log)
        self._members: dict[int, _Connection] = {}
        self._selector = selectors.DefaultSelector()
        self._strangers = Strangers(self._selector, secret, self._admit)
        self._state: Future[None] | None = None  # the last `state.json`, which may not be written yet
        self._state_time = 0.0
        for listener in listeners:
            listener.setblocking(False)
            self._selector.register(listener, selectors.EVENT_READ, self._strangers.accept)

    def run(self) -> None:
        """Serve until the job has ended and the members know it."""
        ended: float | None = None
        while ended is None or (self._members and time.monotonic() < ended + _END_SECONDS):
            now = self._receive_until(time.monotonic() + _TICK)
            self._strangers.drop_late(_PATIENCE)
            for connection in list(self._members.values()):
                if not connection.channel.is_open:
                    self._lose(connection, "its connection closed")
                elif now - connection.last_seen > SILENT:
                    self._lose(connection, f"it has sent nothing for {SILENT:g} s")
            if self._files.refuses:
                self._roster.end_superseded()
            self._roster.decide(now)
            for connection in self._members.values():
                order = self._roster.order_for(connection.index)
                if order != connection.order or now - connection.sent >= BEAT:
                    connection.channel.send(dataclasses.asdict(order))
                    connection.order, connection.sent = order, now
            is_due = now - self._state_time >= _STATE_EVERY and (self._state is None or self._state.done())
            if ended is None and (is_due or self._roster.has_ended):
                self._write_state(now)
            if self._roster.has_ended and ended is None:
                ended = now
        if not self._log.close(_END_SECONDS) and not self._files.refuses:
            warn("The log of the job lacks events: its folder does not answer or is full, or another job writes it.")
        self._log_lock.close()

    def _take_log(self) -> None:
        """Let events be written once no leader of another job writes any, as one that a partition cut off does."""
        state, since = dict[str, Any](), time.monotonic()  # of that leader, and when it was new
        while not self._files.refuses:
            try:
                return self._log_lock.enter_context(locked(self._folder / ".lock", "The log of the job", wait=False))
            except InputError as error:
                if (latest := read_fields(self._folder / STATE, {"unix": int | float})) != state:
                    state, since = latest, time.monotonic()
                if error.reason is not Reason.PEERS_MISSING or time.monotonic() > since + _FROZEN:
                    return  # there are no locks, or that leader is frozen
            time.sleep(_STATE_EVERY)
            self._look_for_another_job()

    def _receive_until(self, deadline: float) -> float:
        """Read what arrives; return a time before which nothing arrived that is unread, even after a pause."""
        while True:
            now = time.monotonic()
            for key, _ in self._selector.select(max(deadline - now, 0.0)):
                key.data(key.fileobj)
            if now >= deadline:
                return now

    def _write(self, kind: Any, code: str, *, severity: Severity = Severity.INFO, text: str, **details: Any) -> int:
        self._log.attempt = details.pop("attempt", self._log.attempt)
        self._files.submit(self._look_for_another_job)  # before it is written, since this process may have been frozen
        return self._log.write(kind, code, severity=severity, text=text, **details)

    def _admit(self, peer: Peer, hello: dict[str, Any], key: str) -> None:
        channel = SecureChannel(peer, key, is_leader=True)
        del hello["nonce"]
        now = time.monotonic()
        try:
            report = Report.parse(hello)
        except (TypeError, ValueError, KeyError):
            text = "A supervisor of another version of zaya_jax was rejected."
            self._reject(channel, Order(text=text, code=SupervisorExit.CONFIGURATION))
            return
        if (rejection := self._roster.admit(report, now)) is not None:
            self._reject(channel, rejection)
            return
        if (old := self._members.pop(report.index, None)) is not None:  # the same supervisor has connected again
            self._forget(old)
        connection = self._members[report.index] = _Connection(channel, report.index, now)
        self._selector.register(channel, selectors.EVENT_READ, lambda _: self._receive(connection))

    def _reject(self, channel: SecureChannel, order: Order) -> None:
        channel.send(dataclasses.asdict(order))
        channel.close()

    def _receive(self, connection: _Connection) -> None:
        for message in connection.channel.receive():
            connection.last_seen = time.monotonic()
            if connection.index in self._roster.members:
                self._roster.observe(Report.parse(message))

    def _lose(self, connection: _Connection, why: str) -> None:
        del self._members[connection.index]
        self._forget(connection)
        self._roster.lose(connection.index, why)

    def _forget(self, connection: _Connection) -> None:
        self._selector.unregister(connection.channel)
        connection.channel.close()

    def _write_state(self, now: float) -> None:
        self._state_time, roster = now, self._roster
        nodes = [
            {"node": index, "name": report.name, "state": str(report.state), "rank": roster.ranks.get(index)}
            | {"held": report.held, "unfit": report.unfit}
            for index, report in sorted(roster.members.items())
        ]
        state = "ended" if roster.has_ended else "running" if roster.order.runs else "waiting"
        details = {"attempt": roster.order.attempt, "nodes": nodes, "lost": dict(roster.lost), "why": roster.order.text}
        details |= {"needed": roster.order.nodes, "strangers": self._strangers.rejected, "exit_code": roster.order.code}
        self._files.submit(self._look_for_another_job)
        self._state = self._files.submit(lambda: write_state(self._folder, state=state, **details))
        self._log.flush()

    def _look_for_another_job(self) -> None:
        """Refuse to write any more once another job has taken a token after this one, rather than before its first."""
        job = newest_job(self._folder.parent / CHECKPOINTS)
        if job == self._setup.name:
            self._roster.has_token = True
        elif job is not None and self._roster.has_token:
            self._files.refuse()


def main() -> None:
    """Lead the job that the first argument describes."""
    for number in NAMES:  # which launchers send to all processes: the supervisor heeds them
        signal.signal(number, signal.SIG_IGN)
    arguments = cast("dict[str, Any]", json.loads(sys.argv[1]))
    listeners = [socket.socket(fileno=file) for file in arguments.pop("listeners")]
    Leader(listeners, os.environ[VARIABLE], Setup(**arguments)).run()


if __name__ == "__main__":
    main()
