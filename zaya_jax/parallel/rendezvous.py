"""The processes of a job meet here before jax starts, so that a missing or duplicate process is named in a message.

Process 0 listens at the coordinator's address until every process has connected and sent its index. Then jax's
coordination service takes over the port, and `PeerLiveness` the connections, which stay open.
"""

import contextlib
import errno
import json
import os
import selectors
import socket
import time
from collections.abc import Iterable
from typing import NamedTuple, NoReturn

from zaya_jax.errors import InputError

ENDS = "!"  # starts the last line of a process that ends the job, followed by exit status and message
_HELLO = "zaya_jax "  # starts the first line of a connection
_WELCOME = "welcome"  # process 0's answer to the first line
_READY = "ready"  # process 0's message that all processes are connected
_LONGEST = 2**16  # bytes of a line, in case another program connected
_ANSWER = 2.0  # seconds to wait for an answer from a process that already has the port
_BUSY = 10.0  # seconds that a name server may be busy
_WELCOMED = 10.0  # seconds to wait for `_WELCOME`; another program never sends it
_MARGIN = 5.0  # seconds to wait longer than process 0, which knows who is missing


class Job(NamedTuple):
    """A process and the job it belongs to."""

    host: str  # where process 0 listens; an IPv6 address without brackets
    port: int
    source: str  # the flag or launcher that host and port come from
    processes: int  # number of processes in the job
    process: int  # index of this process

    @property
    def address(self) -> str:
        """HOST:PORT, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def coordinator(self) -> str:
        """The source and address, for messages."""
        return f"{self.source} {self.address}"


def split_address(text: str, source: str) -> tuple[str, int]:
    """Split HOST:PORT; raises `InputError`, which names the `source`, if `text` is not of that form."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"{source} is {text!r}, but must be HOST:PORT.")
    return host.removeprefix("[").removesuffix("]"), int(port)


class Peer:
    """A non-blocking connection to another process, over which both send lines."""

    def __init__(self, connection: socket.socket, process: int | None = None, host: str = "") -> None:
        """Wrap a connection to `process` on `host`; its index is None until it sends one."""
        connection.setblocking(False)
        self._connection, self._partial_line = connection, b""
        self.process, self.host = process, host

    def __str__(self) -> str:
        """Index and host, for messages."""
        return f"{self.process} on {self.host}"

    def fileno(self) -> int:
        """File descriptor, for selectors."""
        return self._connection.fileno()

    def send(self, line: str) -> None:
        """Send a line, ignoring errors: the peer timeout detects a lost process."""
        with contextlib.suppress(OSError):
            self._connection.send(f"{line}\n".encode(errors="backslashreplace"))

    def receive(self) -> list[str] | None:
        """Return the lines received since the last call; None if the other side has closed."""
        try:
            data = self._connection.recv(_LONGEST)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data or len(self._partial_line) > _LONGEST:
            return None
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def finish(self) -> None:
        """Close the sending side."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()


def dismiss(peers: Iterable[Peer], line: str, seconds: float) -> None:
    """Send a last line, wait until the peers have closed, then close.

    Closing with unread data would reset the connection, and the peer might lose the line.
    """
    peers = list(peers)
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer, selectors.EVENT_READ)
            peer.send(line)
            peer.finish()
        deadline = time.monotonic() + seconds
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj.receive() is None:  # pyright: ignore[reportAttributeAccessIssue]
                    selector.unregister(key.fileobj)
    for peer in peers:
        peer.close()


def meet(job: Job, seconds: float) -> list[Peer]:
    """Wait until all processes of the job are connected.

    Args:
      job: the job, and the index of this process.
      seconds: how long to wait.

    Returns:
      In process 0, connections to all others; in the others, the connection to process 0.

    Raises:
      InputError: a process is missing or lost, two have the same index, their numbers of processes differ, or the
        address cannot be used.
    """
    if job.process == 0:
        return _Gathering(job, seconds).wait()
    return [_wait_for_admission(_connect(job, seconds), job, seconds + _MARGIN)]


class _Refused(InputError):
    """Process 0's message why the job cannot start."""


class _Gathering:
    """Process 0's side of `meet`."""

    def __init__(self, job: Job, seconds: float) -> None:
        self._job, self._seconds = job, seconds
        self._arrived: dict[int, Peer] = {}
        self._selector = selectors.DefaultSelector()

    def wait(self) -> list[Peer]:
        """Wait for the other processes, and return the connections to them."""
        deadline = time.monotonic() + self._seconds
        with contextlib.ExitStack() as stack, self._listen() as listener, self._selector:
            # Process 0 connects to itself: if another program listens at the address, this shows it.
            itself = stack.enter_context(contextlib.closing(_connect(self._job, self._seconds)))
            itself.send(_hello(self._job))
            self._selector.register(listener, selectors.EVENT_READ)
            self._selector.register(itself, selectors.EVENT_READ)
            while len(self._arrived) < self._job.processes:
                events = self._selector.select(max(0, deadline - time.monotonic()))
                if time.monotonic() >= deadline:
                    self._refuse(self._missing())
                for key, _ in events:
                    if key.fileobj is itself:
                        self._receive_own(itself)
                    elif isinstance(key.fileobj, Peer):
                        self._receive(key.fileobj)
                    else:
                        self._selector.register(Peer(listener.accept()[0]), selectors.EVENT_READ)
        self._arrived.pop(0).close()
        others = [self._arrived[process] for process in sorted(self._arrived)]
        for peer in others:  # only now that the port is free for jax
            peer.send(_READY)
        return others

    def _listen(self) -> socket.socket:
        # At every interface by default, as jax's service does.
        host, port = "::" if socket.has_dualstack_ipv6() else "0.0.0.0", self._job.port  # noqa: S104
        if chosen := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
            host, port = split_address(chosen, "JAX_COORDINATOR_BIND_ADDRESS")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            return socket.create_server((host, port), family=family, backlog=self._job.processes + 1,
                                        dualstack_ipv6=host == "::")  # fmt: skip
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # if by another process 0, it sends both the reason
                try:
                    _wait_for_admission(_connect(self._job, 0), self._job, _ANSWER)
                except _Refused:
                    raise
                except InputError:
                    pass
            raise InputError(
                f"Process 0 cannot listen at {self._job.coordinator}: {os.strerror(error.errno or 0)}. End the program "
                f"that uses port {port}, or choose another port"
                f"{'' if self._job.source.startswith('--') else ' (JAX_COORDINATOR_PORT)'}."
            ) from error

    def _receive_own(self, itself: Peer) -> None:
        lines = itself.receive()
        if lines is None:
            self._refuse(f"Another program answered process 0 at {self._job.coordinator} and closed the connection. "
                         "Start process 0 on that host, or correct the address.")  # fmt: skip
        _raise_verdict(lines)

    def _receive(self, peer: Peer) -> None:
        lines = peer.receive()
        if lines is None:
            if peer.process is not None:
                self._refuse(f"Process {peer} was lost before all {self._job.processes} processes had connected. "
                             "Start all of them again.")  # fmt: skip
            self._selector.unregister(peer)
            peer.close()
        elif lines and peer.process is None:
            self._register(peer, lines[0])

    def _register(self, peer: Peer, line: str) -> None:
        try:
            hello = json.loads(line.removeprefix(_HELLO)) if line.startswith(_HELLO) else {}
            peer.process, processes, peer.host = int(hello["process"]), int(hello["processes"]), str(hello["host"])
        except (ValueError, KeyError, TypeError):  # another program; it will disconnect
            return
        if processes != self._job.processes or not 0 <= peer.process < processes:
            self._refuse(f"Process {peer} was started with --processes {processes}, but process 0 with --processes "
                         f"{self._job.processes}. Start all processes with the same number.")  # fmt: skip
        peer.send(_WELCOME)
        first = self._arrived.setdefault(peer.process, peer)
        if first is not peer:
            hosts = f"{first.host} and {peer.host}"
            self._refuse(f"Two processes have --process {peer.process}, on {hosts}. Give each of the {processes} "
                         f"processes a different --process, 0 to {processes - 1}, and each job a different "
                         "port.")  # fmt: skip

    def _missing(self) -> str:
        absent = [process for process in range(self._job.processes) if process not in self._arrived]
        return (
            f"{_list_processes(absent)} of {self._job.processes} did not reach {self._job.coordinator} within "
            f"{self._seconds:g} s; {_list_processes(sorted(self._arrived)).lower()} did. Start every process with this "
            "address and a different --process."
        )

    def _refuse(self, sentence: str) -> NoReturn:
        peers = [key.fileobj for key in self._selector.get_map().values() if isinstance(key.fileobj, Peer)]
        dismiss(peers, f"{ENDS}2 Error: {sentence}", _ANSWER)
        raise InputError(sentence)


def _list_processes(numbers: list[int]) -> str:
    """Format indices as 'Process 3' or 'Processes 1, 2 and 3 more'."""
    listed = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"Process{'es' if len(numbers) > 1 else ''} {listed}"


def _hello(job: Job) -> str:
    return _HELLO + json.dumps({"process": job.process, "processes": job.processes, "host": socket.gethostname()})


def _connect(job: Job, seconds: float) -> Peer:
    """Connect to process 0, which may not listen yet."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            connection = socket.create_connection((job.host, job.port), timeout=5)
            if connection.getsockname() != connection.getpeername():  # a free local port can connect to itself
                return Peer(connection, 0, job.host)
            connection.close()
            problem = os.strerror(errno.ECONNREFUSED)
        except socket.gaierror as error:
            # Kubernetes registers a pod's name only once it is scheduled; a name server may be busy for a moment.
            late = "KUBERNETES_SERVICE_HOST" in os.environ or (
                error.errno == socket.EAI_AGAIN and time.monotonic() < deadline - seconds + _BUSY
            )
            if not late or time.monotonic() >= deadline:
                raise InputError(f"The host of {job.coordinator} could not be resolved ({error.strerror}). Correct the "
                                 "name, or use an IP address.") from error  # fmt: skip
            problem = ""
        except UnicodeError as error:  # a name that the idna codec cannot encode
            raise InputError(f"{job.coordinator} has an invalid host name: each part between dots must have 1 to 63 "
                             "characters.") from error  # fmt: skip
        except OSError as error:
            problem = error.strerror or str(error)
        if time.monotonic() >= deadline:
            raise InputError(f"Process {job.process} could not reach process 0 at {job.coordinator} within "
                             f"{seconds:g} s ({problem}). Start process 0 on that host, or correct the "
                             "address.")  # fmt: skip
        time.sleep(0.2)


def _wait_for_admission(peer: Peer, job: Job, seconds: float) -> Peer:
    """Send this process' index to process 0, and return the connection once all processes are connected."""
    limit, start = min(seconds, _WELCOMED), time.monotonic()
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        stack.callback(peer.close)
        selector.register(peer, selectors.EVENT_READ)
        peer.send(_hello(job))
        while (left := start + limit - time.monotonic()) > 0:
            lines = peer.receive() if selector.select(left) else []
            if lines is None:
                raise InputError(f"{job.coordinator} closed the connection of process {job.process}: process 0 has "
                                 "ended, or another program or job uses the port. Start all processes again, or "
                                 "choose another port.")  # fmt: skip
            _raise_verdict(lines)
            if _READY in lines:
                stack.pop_all()
                return peer
            if _WELCOME in lines:
                limit = seconds
    raise InputError(f"Process {job.process} received no answer from {job.coordinator} for {limit:g} s. Check that "
                     "process 0 runs there, and that no other program uses the port.")  # fmt: skip


def _raise_verdict(lines: list[str]) -> None:
    for line in lines:
        if line.startswith(ENDS):
            raise _Refused(verdict(line)[1].removeprefix("Error: "))


def verdict(line: str) -> tuple[int, str]:
    """Parse a line that ends the job into exit status and message."""
    status, _, sentence = line.removeprefix(ENDS).partition(" ")
    return int(status), sentence
