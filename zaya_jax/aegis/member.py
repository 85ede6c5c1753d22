"""A supervisor's side of a job of several nodes: a thread that reports to the leader, and receives its orders."""

import contextlib
import dataclasses
import secrets
import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.aegis.copies import Copies
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.leader import BEAT, SILENT
from zaya_jax.aegis.leader_process import LeaderProcess
from zaya_jax.aegis.roster import Order, Report, State
from zaya_jax.aegis.secure_channel import SecureChannel
from zaya_jax.errors import InputError, printable
from zaya_jax.run.handshake import NoProofError, exchange_proofs
from zaya_jax.run.job_secret import prove, read_secret
from zaya_jax.run.peer import Peer

_GIVE_UP = 8.0  # seconds without a message of the leader after which this node's processes must not go on
_MARGIN = 15.0  # seconds to wait longer than the leader, which knows which nodes are missing
_ANSWER = 2.0  # seconds that connecting and answering may take, each
_RETRY = 0.2  # seconds
_END_SECONDS = 12.0  # that the leader may take to tell the others how the job ended, and to write it


class Place(NamedTuple):
    """This node in its job."""

    node: int  # index by the launcher
    name: str  # in messages
    host: str  # of the leader
    port: int
    secret: Path  # file with the secret of the job, unless the environment has it
    job: Mapping[str, Any]  # what all supervisors have in common
    patience: float  # seconds to wait for other nodes


class Member:
    """Reports what this supervisor does; `order` is what the leader wants, `ended` how the job has ended."""

    def __init__(self, place: Place, attempt: int, leader: LeaderProcess | None, copies: Copies | None = None) -> None:
        """Join the job; `attempt` is the last one that this node knows, and `leader` is not None on node 0."""
        self._place, self._leader, self._copies = place, leader, copies
        self._report = Report(place.node, place.name, secrets.token_hex(8), place.job, attempt=attempt)
        self.order = Order()
        self._ended: tuple[int, str] | None = None  # exit code and sentence
        self._channel: SecureChannel | None = None
        self._lock = threading.Lock()  # of the channel and the report
        self._closing = threading.Event()
        self._has_joined = False
        self._quiet = 0.0  # seconds without a message of the leader, while this process ran
        self._looked = self._began = time.monotonic()
        self._problem = "it does not answer"  # why there is no connection
        self._secret, self._is_foreign = "", False  # of the job, and whether the leader has another
        self._address: tuple[str, int] | None = None  # of the leader, once it was reached
        self._thread = threading.Thread(target=self._serve, name="member", daemon=True)
        self._thread.start()

    @property
    def pids(self) -> list[int]:
        """The leader's process, if it runs here."""
        return [] if self._leader is None else self._leader.pids

    def wait_for_start(self, idle: Callable[[], bool]) -> tuple[Order, str] | None:
        """Wait for an attempt in which this node has a rank; return the order, and the secret of its processes.

        None once the job has ended, or `idle`, which is called several times a second, returns False.
        """
        self.report(State.FINISHED if self._report.state is State.FINISHED else State.READY)
        while self.ended is None and idle():
            order = self.order
            if order.runs and order.rank is not None and order.attempt > self._report.attempt:
                self.report(State.RUNNING, attempt=order.attempt, rank=order.rank, nodes=order.nodes, unfit="")
                return order, prove(self._secret, "attempt", str(order.attempt), order.nonce)
        return None

    @property
    def is_idle_spare(self) -> bool:
        """True if others train and have saved a checkpoint, but this node has no rank."""
        order = self.order
        return order.runs and order.rank is None and self._copies is not None and self._copies.newest is not None

    @property
    def ended(self) -> tuple[int, str] | None:
        """How the job has ended: exit code and sentence. None while it goes on, and the leader sends."""
        # Every thread that asks counts: the one that talks to the leader may wait for a file system or a name server.
        if self._ended is None:
            self._count_quiet()
        return self._ended

    @property
    def stop(self) -> Order | None:
        """Why the attempt that runs must stop, with suspects by their numbers here; None while it is to go on."""
        order, report = self.order, self._report
        if (ended := self.ended) is not None:
            code, text = ended
            return Order(code=code, text=text, is_lost=code == SupervisorExit.RETRY_ELSEWHERE, event=order.event)
        if order.attempt != report.attempt:
            return Order(text=f"Attempt {order.attempt} runs without this node.", is_lost=True, event=order.event)
        if order.runs and order.rank == report.rank:
            return None
        count = self._place.job["processes"]
        own = (number % count for number in order.suspects if number // count == report.rank)
        return dataclasses.replace(order, suspects=tuple(own))

    def report(self, state: State, **changes: Any) -> None:
        """Tell the leader what this node does."""
        if "text" in changes:
            changes["text"] = printable(changes["text"], 500)
        with self._lock:
            unsaid = {"samples": None}
            if state is not State.READY:  # a restarted leader may not know yet why the attempt failed
                unsaid |= {"text": "", "event": None}
            self._report = dataclasses.replace(self._report, **(unsaid | changes), state=state)
            self._send_report()

    def note(self, **changes: Any) -> None:
        """Change what the next message tells the leader: `samples` of the processes, or why this node is `unfit`."""
        with self._lock:
            self._report = dataclasses.replace(self._report, **changes)

    def leave(self, code: SupervisorExit, text: str) -> None:
        """Say that this supervisor ends, unless the job has ended, and wait until the others know it."""
        if must_tell := self.ended is None:
            self.report(State.LEFT, code=int(code), text=text)
        self._closing.set()
        if (must_tell and self._has_joined) or self._leader is not None:  # else its thread may wait for a lost node
            self._thread.join(_END_SECONDS + 3 * _ANSWER)

    def _send_report(self) -> None:
        if self._channel is not None:
            self._channel.send(self._describe())

    def _describe(self) -> dict[str, Any]:
        if (copies := self._copies) is not None:
            self._report = dataclasses.replace(self._report, address=copies.address, held=copies.held)
        return dataclasses.asdict(self._report)

    def _serve(self) -> None:
        try:
            self._keep_talking()
        except Exception as error:  # without this thread nobody would end the processes of a node that is given up
            traceback.print_exc()
            text = f"The connection to the leader failed: {type(error).__name__}: {error}."
            self._ended = SupervisorExit.SOFTWARE, text
        if self._channel is not None:
            self._channel.finish(_ANSWER)
        if self._leader is not None:
            self._closing.wait()  # the kernel would kill the leader with this thread
            self._leader.end(_END_SECONDS)

    def _keep_talking(self) -> None:
        while self.ended is None:
            was_lost = self._talk()
            if self._closing.is_set() and (self._channel is not None or not self._has_joined):
                return  # the leader knows, or has never known this node
            if self._leader is not None and self.ended is None:
                self._leader.revive(was_lost=was_lost)
            time.sleep(_RETRY)

    def _talk(self) -> bool:
        """Connect to the leader and exchange messages until the connection is lost; False if it was never there."""
        try:
            channel = self._connect()
        except (OSError, InputError) as error:
            self._problem = getattr(error, "strerror", None) or str(error)
            return False
        sent = time.monotonic()
        with self._lock:
            self._channel = channel
            self._send_report()
        while channel.is_open and self.ended is None and not self._closing.is_set():
            select.select([channel], [], [], BEAT / 2)
            for message in channel.receive():
                self._quiet = 0.0
                self._follow(Order(**message))
            if self._quiet > SILENT:
                break
            if time.monotonic() - sent >= BEAT:
                sent = time.monotonic()
                with self._lock:
                    self._send_report()
        if self.ended is None and not (self._closing.is_set() and channel.is_open):
            with self._lock:
                self._channel = None
            channel.close()
        return True

    def _connect(self) -> SecureChannel:
        place, deadline = self._place, time.monotonic() + 2 * _ANSWER
        connection = socket.create_connection(self._address or (place.host, place.port), timeout=_ANSWER)
        try:
            with self._lock:
                hello = self._describe()
            key = exchange_proofs(connection, self._find_secret, hello, deadline)
            if self._copies is not None:
                with contextlib.suppress(OSError):  # tried again with the next connection
                    self._copies.start(connection.getsockname()[0], self._secret)
        except BaseException as error:
            self._is_foreign = isinstance(error, NoProofError)
            connection.close()
            raise
        self._is_foreign = False
        self._address = connection.getpeername()[:2]  # a name server may be out of reach when the leader is
        return SecureChannel(Peer(connection), key, is_leader=False)

    def _find_secret(self) -> str:
        if not self._secret or self._is_foreign:  # otherwise do not read it again: the file system may hang
            if (secret := read_secret(self._place.secret)) is None:
                raise OSError(f"it has not written {self._place.secret}, the secret of the job")
            self._secret = secret
        return self._secret

    def _follow(self, order: Order) -> None:
        self._has_joined = True
        if order.code is not None:  # first, since another thread reads both
            self._ended = order.code, order.text
        self.order = order
        self.note(has_token=order.has_token or self._report.has_token)
        if self._copies is not None:
            self._copies.follow(order.peers, copies=order.copies, has_rank=order.rank is not None)

    def _count_quiet(self) -> None:
        """Count the time without a message, but for pauses of this process itself; give up if it is too long."""
        now = time.monotonic()
        self._quiet += min(now - self._looked, 2 * _ANSWER)
        self._looked = now
        leader = f"the leader of the job at {self._place.host}:{self._place.port}"
        code = SupervisorExit.RETRY_ELSEWHERE
        if self._has_joined and self._quiet > _GIVE_UP:
            problem = f"Node 0, with {leader}, has sent nothing for {_GIVE_UP:g} s ({self._problem})"
            self._ended = code, f"{problem}, so the processes of {self._place.name} were stopped."
        elif not self._has_joined and now - self._began > self._place.patience + _MARGIN:
            seconds = self._place.patience + _MARGIN
            self._ended = code, f"{self._place.name} could not join {leader} within {seconds:g} s ({self._problem})."
