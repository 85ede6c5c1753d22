"""The processes of a job connect here before jax starts, so that a missing or duplicate process is named in a message.

Process 0 listens at the coordinator's address until every process has connected twice: for the lines of `PeerLiveness`,
and for jax's coordination service (`relay`). Then nothing of this package listens to other hosts any more.

Whoever connects is a stranger until it has proved that it knows the secret of the job (`run.job_secret`). The sides
exchange

    process 0:  zaya_jax NONCE
    the other:  {"process": 1, "processes": 2, "host": "node2", "channel": "lines", "nonce": NONCE} PROOF
    process 0:  welcome PROOF

where each proof covers the other side's nonce, so that recorded lines are worthless. A stranger learns nothing else, and
whatever it sends costs its own connection only.
"""

import contextlib
import errno
import json
import os
import secrets
import selectors
import socket
import time
from pathlib import Path
from typing import NamedTuple, NoReturn

from zaya_jax.errors import InputError, PeersMissing, printable
from zaya_jax.parallel.peer import Peer, end_connections
from zaya_jax.run.job_secret import VARIABLE, is_proof, prove, read_secret, secret_from_environment, secret_path, share_secret
from zaya_jax.run.signals import warn

_HELLO = "zaya_jax "  # starts process 0's first line
_WELCOME = "welcome "  # starts process 0's answer to a proof
_REJECTED = "rejected"  # process 0's answer to a wrong proof
_READY = "ready"  # process 0's message that all processes are connected
_REFUSALS = {"missing ": PeersMissing, "invalid ": InputError}  # what starts process 0's message why no job starts
_LINES, _SERVICE = "lines", "service"  # the two connections
_MOST_STRANGERS = 64  # connections at a time
_LONGEST = 1024  # bytes of a line of process 0 before its proof
_PATIENCE = 10.0  # seconds that a stranger, or process 0, may take to prove that it belongs to the job
_ANSWER = 2.0  # seconds to wait for an answer from a process that already has the port
_BUSY = 10.0  # seconds that a name server may be busy
_RETRY = 0.2  # seconds
_MARGIN = 5.0  # seconds to wait longer than process 0, which knows who is missing


class Job(NamedTuple):
    """A process and the job it belongs to."""

    host: str  # where process 0 listens; an IPv6 address without brackets
    port: int
    source: str  # the flag or launcher that host and port come from
    processes: int  # number of processes in the job
    process: int  # index of this process
    folder: Path | None = None  # that all processes share; without one, their user's cache is

    @property
    def address(self) -> str:
        """HOST:PORT, with brackets around an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def coordinator(self) -> str:
        """The source and address, for messages."""
        return f"{self.source} {self.address}"

    @property
    def secret_path(self) -> Path:
        """File in which process 0 hands on the secret."""
        return secret_path(self.folder, self.address)


def split_address(text: str, source: str) -> tuple[str, int]:
    """Split HOST:PORT; raises `InputError`, which names the `source`, if `text` is not of that form."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise InputError(f"{source} is {text!r}, but must be HOST:PORT.")
    return host.removeprefix("[").removesuffix("]"), int(port)


def meet(job: Job, seconds: float) -> list[Peer]:
    """Wait until all processes of the job are connected.

    Args:
      job: the job, and the index of this process.
      seconds: how long to wait.

    Returns:
      In process 0, connections to all others; in the others, the connection to process 0.

    Raises:
      PeersMissing: a process is missing or lost, or the address is in use.
      InputError: two processes have the same index, their numbers of processes or secrets differ, or the address
        cannot be used.
    """
    if job.processes == 1:
        return []
    if job.process == 0:
        return _Members(job, seconds).wait()
    deadline = time.monotonic() + seconds
    peer = _enter(job, _LINES, deadline, seconds)
    with contextlib.ExitStack() as stack:
        stack.callback(peer.close)
        peer.tunnel = _enter(job, _SERVICE, deadline, seconds, peer).detach()
        _wait_until_ready(peer, job, seconds + _MARGIN)
        stack.pop_all()
    return [peer]


class _Members:
    """Process 0's side of `meet`: the processes that have proved that they belong to the job, and strangers."""

    def __init__(self, job: Job, seconds: float) -> None:
        self._job, self._seconds, self._secret = job, seconds, ""
        self._members: dict[tuple[int, str], Peer] = {}  # by index and channel
        self._strangers: dict[Peer, tuple[str, float]] = {}  # nonce, and when to drop it; the oldest first
        self._rejected = 0  # number of wrong proofs
        self._last_rejected = ""  # address
        self._selector = selectors.DefaultSelector()

    def wait(self) -> list[Peer]:
        """Wait for the other processes, and return the connections to them."""
        deadline, others = time.monotonic() + self._seconds, range(1, self._job.processes)
        with self._selector, contextlib.ExitStack() as stack:
            stack.callback(self._drop_strangers)
            self._listen(stack, deadline)
            self._secret = stack.enter_context(share_secret(self._job.secret_path))
            while len(self._members) < 2 * len(others):
                now = time.monotonic()
                if now >= deadline:
                    self._refuse(PeersMissing(self._describe_missing()))
                self._drop_strangers(now)
                for key, _ in self._selector.select(min(deadline - now, 1.0)):
                    if isinstance(key.fileobj, Peer):
                        self._receive(key.fileobj)
                    else:
                        self._accept(key.fileobj)  # pyright: ignore[reportArgumentType]
        if self._rejected:
            warn(f"Process 0 {self._describe_rejected()}")
        for process in others:  # only now that nothing listens at the port
            peer = self._members[process, _LINES]
            peer.tunnel = self._members[process, _SERVICE].detach()
            peer.send(_READY)
        return [self._members[process, _LINES] for process in others]

    def _listen(self, stack: contextlib.ExitStack, deadline: float) -> None:
        host, port = self._job.host, self._job.port
        if chosen := os.environ.get("JAX_COORDINATOR_BIND_ADDRESS"):
            host, port = split_address(chosen, "JAX_COORDINATOR_BIND_ADDRESS")
        problem = OSError()
        for address in _resolve(self._job, host, deadline, self._seconds):
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                listener = socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN,
                                                dualstack_ipv6=address == "::" and socket.has_dualstack_ipv6())  # fmt: skip
            except OSError as error:
                problem = error
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    continue  # such as ::1 of localhost where there is no IPv6
                self._end_other_job(error)
            else:
                listener.setblocking(False)
                self._selector.register(stack.enter_context(listener), selectors.EVENT_READ)
        if not self._selector.get_map():
            raise InputError(
                f"Process 0 cannot listen at {self._job.coordinator}: {host} is no address of this host. Start process "
                "0 on that host; or if the address is translated, set JAX_COORDINATOR_BIND_ADDRESS=ADDRESS:PORT to an "
                "address of this host."
            ) from problem

    def _end_other_job(self, error: OSError) -> NoReturn:
        """Raise the reason why process 0 cannot listen; another process 0 of the job, if it is that, ends with it."""
        if error.errno == errno.EADDRINUSE:
            with contextlib.suppress(PeersMissing):
                with contextlib.closing(_enter(self._job, _LINES, time.monotonic(), 0)) as peer:
                    _wait_until_ready(peer, self._job, _ANSWER)
        raise PeersMissing(
            f"Process 0 cannot listen at {self._job.coordinator}: {os.strerror(error.errno or 0)}. End the program "
            f"that uses port {self._job.port}, or choose another port"
            f"{'' if self._job.source.startswith('--') else ' (JAX_COORDINATOR_PORT)'}."
        ) from error

    def _accept(self, listener: socket.socket) -> None:
        if len(self._strangers) >= _MOST_STRANGERS:
            self._drop(next(iter(self._strangers)))
        try:
            connection, address = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # no file descriptor is left
            if self._strangers:
                self._drop(next(iter(self._strangers)))
            else:
                time.sleep(_RETRY)
            return
        peer, nonce = Peer(connection, host=address[0]), secrets.token_hex(16)
        self._strangers[peer] = nonce, time.monotonic() + _PATIENCE
        self._selector.register(peer, selectors.EVENT_READ)
        peer.send(_HELLO + nonce)

    def _drop(self, stranger: Peer) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger)
        stranger.close()

    def _drop_strangers(self, now: float = float("inf")) -> None:
        """Close the connections of strangers whose time is over."""
        for stranger in [stranger for stranger, (_, end) in self._strangers.items() if end < now]:
            self._drop(stranger)

    def _receive(self, peer: Peer) -> None:
        if peer.process is None and peer not in self._strangers:
            return  # dropped since it sent this
        lines = peer.receive()
        if lines is None and peer.process is not None:
            self._refuse(PeersMissing(
                f"Process {peer} was lost before all {self._job.processes} processes had connected. Start all of them "
                "again."
            ))  # fmt: skip
        if peer.process is None and lines:
            self._check_proof(peer, lines[0])
        elif lines is None:
            self._drop(peer)

    def _check_proof(self, peer: Peer, line: str) -> None:
        body, _, proof = line.rpartition(" ")
        if is_proof(proof, self._secret, "enter", self._strangers[peer][0], body):
            del self._strangers[peer]
            self._admit(peer, json.loads(body))
            return
        self._rejected, self._last_rejected = self._rejected + 1, peer.host
        peer.send(_REJECTED)
        self._drop(peer)

    def _admit(self, peer: Peer, hello: dict[str, str]) -> None:
        """Make a stranger that has proved to know the secret a member."""
        process, processes, channel = int(hello["process"]), int(hello["processes"]), hello["channel"]
        peer.process, peer.host = process, printable(hello["host"], 255)
        peer.send(_WELCOME + prove(self._secret, "admit", hello["nonce"]))
        if processes != self._job.processes or not 0 <= process < processes:
            self._refuse(InputError(
                f"Process {peer} was started with --processes {processes}, but process 0 with --processes "
                f"{self._job.processes}. Start all processes with the same number."
            ))  # fmt: skip
        first = self._members.setdefault((process, channel), peer).host if process else socket.gethostname()
        if process == 0 or self._members[process, channel] is not peer:
            self._refuse(InputError(
                f"Two processes have --process {process}, on {first} and {peer.host}. Give each of the {processes} "
                f"processes a different --process, 0 to {processes - 1}, and each job a different port."
            ))  # fmt: skip

    def _describe_missing(self) -> str:
        job, listeners = self._job, [key.fileobj for key in self._selector.get_map().values()]
        absent = [process for process in range(1, job.processes) if (process, _SERVICE) not in self._members]
        present = [process for process in range(job.processes) if process not in absent]
        addresses = {each.getsockname()[0] for each in listeners if isinstance(each, socket.socket)}
        elsewhere = "" if job.host in addresses else f" (it listens at {' and '.join(sorted(addresses))})"
        return (
            f"{_list_processes(absent)} of {job.processes} did not reach {job.coordinator}{elsewhere} within "
            f"{self._seconds:g} s; {_list_processes(present).lower()} did. Start every process with this address and a "
            f"different --process.{f' It {self._describe_rejected()}' if self._rejected else ''}"
        )

    def _describe_rejected(self) -> str:
        plural = "s" if self._rejected > 1 else ""
        return (f"rejected {self._rejected:,} connection{plural} without the secret of this job, the last from "
                f"{self._last_rejected}.")  # fmt: skip

    def _refuse(self, error: InputError) -> NoReturn:
        peers = [key.fileobj for key in self._selector.get_map().values() if isinstance(key.fileobj, Peer)]
        start = next(start for start, kind in _REFUSALS.items() if isinstance(error, kind))
        end_connections([peer for peer in peers if peer.process is not None], f"{start}{error}", _ANSWER)
        raise error


def _list_processes(numbers: list[int]) -> str:
    """Format indices as 'Process 3' or 'Processes 1, 2 and 3 more'."""
    listed = ", ".join(map(str, numbers[:8])) + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
    return f"Process{'es' if len(numbers) > 1 else ''} {listed}"


def _resolve(job: Job, host: str, deadline: float, seconds: float) -> list[str]:
    """Return the addresses of a host; `InputError` if its name cannot be resolved."""
    while True:
        try:
            return list(dict.fromkeys(str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)))
        except socket.gaierror as error:
            # Kubernetes registers a pod's name only once it is scheduled; a name server may be busy for a moment.
            late = "KUBERNETES_SERVICE_HOST" in os.environ or (
                error.errno == socket.EAI_AGAIN and time.monotonic() < deadline - seconds + _BUSY
            )
            if not late or time.monotonic() >= deadline:
                raise PeersMissing(f"The host of {job.coordinator} could not be resolved ({error.strerror}). Correct "
                                   "the name, or use an IP address.") from error  # fmt: skip
        except UnicodeError as error:  # a name that the idna codec cannot encode
            raise InputError(f"{job.coordinator} has an invalid host name: each part between dots must have 1 to 63 "
                             "characters.") from error  # fmt: skip
        time.sleep(_RETRY)


def _connect(job: Job, deadline: float, seconds: float) -> socket.socket:
    """Connect to process 0, which may not listen yet."""
    while True:
        problem = ""
        for address in _resolve(job, job.host, deadline, seconds):
            try:
                connection = socket.create_connection((address, job.port), timeout=5)
                if connection.getsockname() != connection.getpeername():  # a free local port can connect to itself
                    return connection
                connection.close()
                problem = os.strerror(errno.ECONNREFUSED)
            except OSError as error:
                problem = error.strerror or str(error)
        if time.monotonic() >= deadline:
            raise PeersMissing(f"Process {job.process} could not reach process 0 at {job.coordinator} within "
                               f"{seconds:g} s ({problem}). Start process 0 on that host, or correct the "
                               "address.")  # fmt: skip
        time.sleep(_RETRY)


def _enter(job: Job, channel: str, deadline: float, seconds: float, lines: Peer | None = None) -> Peer:
    """Connect to process 0 for one `channel`, and prove that this process belongs to the job.

    Process 0 may drop the connection of a stranger, and a file may have the secret of an earlier start, so this tries
    again until the deadline, unless process 0 ends the start over the connection for `lines`.
    """
    while True:
        with contextlib.ExitStack() as stack:
            connection = stack.enter_context(_connect(job, deadline, seconds))
            problem = _exchange_proofs(connection, job, channel)
            if not problem:
                stack.pop_all()
                return Peer(connection, 0, job.host)
        if lines is not None:
            _raise_refusal(lines.receive(), job)
        if time.monotonic() >= deadline:
            raise PeersMissing(problem)
        time.sleep(_RETRY)


def _exchange_proofs(connection: socket.socket, job: Job, channel: str) -> str:
    """Return why process 0 has not admitted this process; '' if it has."""
    deadline, nonce = time.monotonic() + (_PATIENCE if job.process else _ANSWER), secrets.token_hex(16)
    try:
        challenge = _read_line(connection, deadline)
        secret = read_secret(job.secret_path)
        if secret is None:
            return (f"Process {job.process} found no secret of the job, neither in {job.secret_path} nor in {VARIABLE}. "
                    f"Start process 0, and start all as the same user with a shared folder, or set {VARIABLE} for "
                    "all.")  # fmt: skip
        body = json.dumps({"process": job.process, "processes": job.processes, "host": socket.gethostname(),
                           "channel": channel, "nonce": nonce})  # fmt: skip
        if challenge.startswith(_HELLO):
            proof = prove(secret, "enter", challenge.removeprefix(_HELLO), body)
            connection.sendall(f"{body} {proof}\n".encode())
            answer = _read_line(connection, deadline)
            if answer.startswith(_WELCOME) and is_proof(answer.removeprefix(_WELCOME), secret, "admit", nonce):
                return ""
            if answer == _REJECTED and job.process and secret_from_environment():
                raise InputError(f"Process {job.process} has another {VARIABLE} than process 0 at {job.coordinator}. Set "
                                 "the same one for all processes, or for none.")  # fmt: skip
            if answer == _REJECTED:
                return (f"Process 0 at {job.coordinator} has another secret than {job.secret_path}, where process "
                        f"{job.process} looks. Start all processes again, or set the same {VARIABLE} for all.")  # fmt: skip
    except TimeoutError as error:
        raise PeersMissing(f"Process {job.process} received no answer from {job.coordinator} for {_PATIENCE:g} s. Check "
                           "that process 0 runs there, and that no other program uses the port.") from error  # fmt: skip
    except OSError:
        return (f"{job.coordinator} closed the connection of process {job.process}: process 0 has ended, or another "
                "program or job uses the port. Start all processes again, or choose another port.")  # fmt: skip
    raise PeersMissing(f"Process {job.process} received no answer of a process 0 from {job.coordinator}: another "
                       "program uses the port. Choose another port.")  # fmt: skip


def _read_line(connection: socket.socket, deadline: float) -> str:
    """Read a line, and no byte after it."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(line) > _LONGEST:
            raise ConnectionAbortedError
        line += byte
    return line[:-1].decode(errors="replace")


def _wait_until_ready(peer: Peer, job: Job, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(peer, selectors.EVENT_READ)
        while (left := deadline - time.monotonic()) > 0:
            lines = peer.receive() if selector.select(left) else []
            _raise_refusal(lines, job)
            if _READY in (lines or ()):
                return
    raise PeersMissing(f"Process {job.process} received no answer from {job.coordinator} for {seconds:g} s. Check that "
                       "process 0 runs there.")  # fmt: skip


def _raise_refusal(lines: list[str] | None, job: Job) -> None:
    """Raise the error in process 0's `lines`, if there is one, or that it has closed the connection."""
    for line in lines or ():
        for start, kind in _REFUSALS.items():
            if line.startswith(start):
                raise kind(printable(line.removeprefix(start)))
    if lines is None:
        raise PeersMissing(f"{job.coordinator} closed the connection of process {job.process}: process 0 has ended. Start "
                           "all processes again.")  # fmt: skip
