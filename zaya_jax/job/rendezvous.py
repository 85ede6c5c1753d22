"""The processes of a job connect here before jax starts, so that a missing or duplicate process is named in a message.

Process 0 listens at the coordinator's address until every process has connected twice: for the lines of `PeerLiveness`,
and for jax's coordination service (`relay`). From then on nothing of this package listens to other hosts.

Whoever connects is a stranger until it has proved that it knows the secret of the job (`run.handshake`).
"""

import contextlib
import errno
import functools
import os
import random
import select
import selectors
import socket
import time
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from zaya_jax.config.checks import counted
from zaya_jax.errors import InputError, PeersMissing, printable
from zaya_jax.run.handshake import NoProofError, Strangers, exchange_proofs, read_line
from zaya_jax.run.job_secret import VARIABLE, read_secret, secret_path, share_secret
from zaya_jax.run.launcher import split_address
from zaya_jax.run.listening import BIND, BIND_INSTEAD, listen, open_listener, resolve
from zaya_jax.run.peer import Peer, end_connections
from zaya_jax.run.signals import warn, warn_once

_READY = "ready"  # process 0's message that all processes are connected
_REFUSALS = {"missing ": PeersMissing, "invalid ": InputError}  # starts process 0's message why the job does not start
_LINES, _SERVICE = "lines", "service"  # the two connections
_PATIENCE = 10.0  # seconds that a proof may take
_ANSWER = 2.0  # seconds to wait for an answer from a process that already has the port
_RETRY = 0.2  # seconds
_MARGIN = 5.0  # seconds to wait longer than process 0, which knows who is missing
T = TypeVar("T")


class Job(NamedTuple):
    """A process and the job it belongs to."""

    host: str  # where process 0 listens; an IPv6 address without brackets
    port: int
    source: str  # the flag or launcher that host and port come from
    processes: int  # number of processes in the job
    process: int  # index of this process
    folder: Path | None = None  # that all processes share; without one, they share their user's cache

    @property
    def address(self) -> str:
        """HOST:PORT, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def coordinator(self) -> str:
        """The source and address, for messages."""
        return f"{self.source} {self.address}"


def connect_processes(job: Job, seconds: float) -> list[Peer]:
    """Wait for `seconds` until all processes are connected; return process 0's peers, or in the others process 0.

    `PeersMissing` if a process is missing or lost, or the address is in use; `InputError` if the indices, numbers of
    processes or secrets contradict, or the address cannot be used.
    """
    if job.processes == 1:
        return []
    if job.process == 0:
        return _Members(job, seconds).wait()
    start = time.monotonic()
    with contextlib.ExitStack() as stack:
        lines = stack.enter_context(_enter(job, _LINES, start, seconds))
        service = stack.enter_context(_enter(job, _SERVICE, start, seconds, lines))
        _wait_until_ready(lines, job, seconds + _MARGIN)
        stack.pop_all()
    return [Peer(lines, 0, job.host, service)]


class _Members:
    """Process 0's view: the processes that have proved that they belong to the job, and strangers."""

    def __init__(self, job: Job, seconds: float) -> None:
        self._job, self._seconds, self._start = job, seconds, time.monotonic()
        self._members: dict[tuple[int, str], Peer] = {}  # by index and channel
        self._strangers: Strangers | None = None
        self._selector = selectors.DefaultSelector()

    def wait(self) -> list[Peer]:
        others = range(1, self._job.processes)
        with self._selector, contextlib.ExitStack() as stack:
            path = secret_path(self._job.folder, self._job.address)
            listeners = self._listen(stack)
            self._strangers = strangers = Strangers(
                self._selector, stack.enter_context(share_secret(path)), self._admit
            )
            stack.callback(strangers.close)
            for listener in listeners:
                self._selector.register(listener, selectors.EVENT_READ, strangers.accept)
            while len(self._members) < 2 * len(others):
                left = self._start + self._seconds - time.monotonic()
                if left <= 0:
                    self._refuse(PeersMissing(self._describe_missing()))
                strangers.drop_late(_PATIENCE)
                for key, _ in self._selector.select(min(left, 1.0)):
                    key.data(key.fileobj)
        if self._rejection:
            warn(self._rejection)
        for process in others:  # only now that nothing listens at the port
            peer = self._members[process, _LINES]
            peer.tunnel = self._members[process, _SERVICE].connection
            peer.send(_READY)
        return [self._members[process, _LINES] for process in others]

    def _listen(self, stack: contextlib.ExitStack) -> list[socket.socket]:
        host, port = self._job.host, self._job.port
        if chosen := os.environ.get(BIND):
            host, port = split_address(chosen, BIND)
        open_at = functools.partial(self._open_listener, port=port)
        listeners = listen("Process 0", host, self._job.coordinator, self._start, self._seconds, open_at)
        return [stack.enter_context(listener) for listener in listeners]

    def _open_listener(self, address: str, port: int) -> socket.socket | None:
        """Listen at an address, if this host has it. If another process 0 of the job has the port, both end."""
        end = time.monotonic() + _ANSWER
        while True:
            try:
                return open_listener(address, port)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    with contextlib.suppress(PeersMissing), _enter(self._job, _LINES, 0, 0) as connection:
                        _wait_until_ready(connection, self._job, _ANSWER)
                    if time.monotonic() < end:  # two that start in the same moment can find the port in use, both
                        time.sleep(random.uniform(0, _RETRY))
                        continue
                problem = f"Process 0 cannot listen at {self._job.coordinator}: {os.strerror(error.errno or 0)}"
                other = "another port" if self._job.source.startswith("--") else "another port (JAX_COORDINATOR_PORT)"
                remedy = f"End the program that uses port {self._job.port}, or choose {other}."
                raise PeersMissing(f"{problem}. {remedy}") from error

    def _receive(self, peer: Peer) -> None:
        if peer.receive() is None:
            before = f"before all {self._job.processes} processes had connected"
            self._refuse(PeersMissing(f"Process {peer} was lost {before}. Start all of them again."))

    def _admit(self, peer: Peer, hello: dict[str, Any], key: str) -> None:
        self._selector.register(peer, selectors.EVENT_READ, self._receive)
        process, processes, connection = hello["process"], hello["processes"], (hello["process"], hello["channel"])
        peer.process, peer.host = process, printable(hello["host"], 255)
        if processes != self._job.processes or not 0 <= process < processes:
            own = f"but process 0 with --processes {self._job.processes}. Start all with the same number."
            self._refuse(InputError(f"Process {peer} was started with --processes {processes}, {own}"))
        if process == 0 or connection in self._members:
            first = self._members[connection].host if process else socket.gethostname()
            twice = f"Two processes have --process {process}, on {first} and {peer.host}"
            remedy = f"a different --process, 0 to {processes - 1}, and each job a different port"
            self._refuse(InputError(f"{twice}. Give each of the {processes} processes {remedy}."))
        self._members[connection] = peer

    @property
    def _rejection(self) -> str:
        """A sentence about wrong proofs; empty if there were none."""
        if self._strangers is None or not self._strangers.rejected:
            return ""
        count = counted(self._strangers.rejected, "connection")
        problem = f"Process 0 rejected {count} without the secret of this job ({VARIABLE})"
        return f"{problem}, the last from {self._strangers.last}."

    def _describe_missing(self) -> str:
        job, absent = self._job, [n for n in range(1, self._job.processes) if (n, _SERVICE) not in self._members]
        present = list_processes([process for process in range(job.processes) if process not in absent]).lower()
        addresses = " and ".join(listener.getsockname()[0] for listener in self._connections(socket.socket))
        return (
            f"{list_processes(absent)} of {job.processes} did not reach {job.coordinator} within {self._seconds:g} s; "
            f"{present} did. Start every process with this address and a different --process. Process 0 listened at "
            f"{addresses}; if other hosts do not reach that, {BIND_INSTEAD}. {self._rejection}"
        ).strip()

    def _refuse(self, error: InputError) -> NoReturn:
        members = [peer for peer in self._connections(Peer) if peer.process is not None]
        start = next(start for start, kind in _REFUSALS.items() if isinstance(error, kind))
        end_connections(members, _ANSWER, f"{start}{error}")
        raise error

    def _connections(self, kind: type[T]) -> list[T]:
        return [key.fileobj for key in self._selector.get_map().values() if isinstance(key.fileobj, kind)]


def list_processes(numbers: list[int]) -> str:
    """Format indices as 'Process 3' or 'Processes 1, 2 and 3 more'."""
    listed = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"Process{'es' if len(numbers) > 1 else ''} {listed}"


def _enter(job: Job, channel: str, start: float, seconds: float, lines: socket.socket | None = None) -> socket.socket:
    """Connect to process 0 for a `channel`, and prove that this process belongs to the job.

    Process 0 may not listen yet, it drops strangers when there are too many, and the secret may be that of an earlier
    start, so this tries again, until process 0 ends the start over the connection for `lines`.
    """
    poll = select.poll()
    while True:
        problem = ""
        for address in resolve(job.host, job.coordinator, start, seconds):
            try:
                with contextlib.ExitStack() as stack:
                    connection = stack.enter_context(socket.create_connection((address, job.port), timeout=5))
                    _exchange_proofs(connection, job, channel)
                    stack.pop_all()
                    return connection
            except (OSError, InputError) as error:  # InputError: a secret of another user's start
                problem = getattr(error, "strerror", None) or str(error)
        if lines is not None:
            poll.register(lines, select.POLLIN)
            if poll.poll(0):
                _wait_until_ready(lines, job, _ANSWER)
        if time.monotonic() >= start + seconds:
            failed = f"Process {job.process} could not reach process 0 at {job.coordinator} within {seconds:g} s"
            raise PeersMissing(f"{failed} ({problem}). Start process 0 on that host, or correct the address.")
        time.sleep(_RETRY)


def _exchange_proofs(connection: socket.socket, job: Job, channel: str) -> None:
    """Prove to process 0 that this process belongs to the job, and check its proof; `OSError` if it sends none."""
    path, hello = secret_path(job.folder, job.address), {"process": job.process, "processes": job.processes}

    def find_secret() -> str:
        if (secret := read_secret(path)) is None:
            remedy = f"If the processes share no folder, set {VARIABLE} for all"
            raise OSError(f"it has not written {path}, the secret of the job. {remedy}")
        return secret

    deadline = time.monotonic() + (_PATIENCE if job.process else _ANSWER)
    try:
        exchange_proofs(connection, find_secret, {**hello, "host": socket.gethostname(), "channel": channel}, deadline)
    except NoProofError as error:
        if not (error.is_said and job.process and os.environ.get(VARIABLE)):
            raise OSError(f"its secret is not that in {path}") from error
        problem = f"it has another {VARIABLE}; set the same for all processes, or for none"
        warn_once(f"Process {job.process} cannot join process 0 at {job.coordinator} yet: {problem}.")
        raise OSError(problem) from error  # to try again, since a stranger can say so


def _wait_until_ready(lines: socket.socket, job: Job, seconds: float) -> None:
    """Wait until process 0 says that all are connected; raise why, if it ends the start instead."""
    try:
        line = read_line(lines, time.monotonic() + seconds)
    except OSError as error:
        problem = f"Process {job.process} received no answer from process 0 at {job.coordinator} ({error})"
        raise PeersMissing(f"{problem}. Start all processes again.") from error
    for start, kind in _REFUSALS.items():
        if line.startswith(start):
            raise kind(printable(line.removeprefix(start)))
