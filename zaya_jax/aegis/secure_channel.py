"""A connection between two supervisors, over which both send JSON that nobody else can forge, change or repeat.

Who connects is a stranger until it has proved that it knows the secret of the job (`run.job_secret`), and so has the
leader:

    leader:  zaya_aegis NONCE
    member:  {"nonce": NONCE, "index": 1, ...} PROOF
    leader:  PROOF

Each proof covers the nonce of the other side. Each later line starts with an HMAC under a key that both nonces make,
over the direction, the number of the line and its content: what was recorded or reordered does not fit. Nothing is
encrypted, so nothing that is sent is secret.
"""

import contextlib
import json
import secrets
import select
import socket
import time
from collections.abc import Mapping
from typing import Any

from zaya_jax.run.job_secret import is_proof, prove

_HELLO = "zaya_aegis "  # starts the leader's first line
_REJECTED = "rejected"  # the leader's answer to a wrong proof
LONGEST = 2**13  # bytes of a line
_MOST_UNSENT = 2**16  # bytes that a member may leave unread


class ForeignError(ConnectionError):
    """The other side does not know the secret of the job, or speaks another language."""


class _Lines:
    """A non-blocking connection, as lines of at most `LONGEST` bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection, self.fileno = connection, connection.fileno  # for selectors
        self._unsent = self._partial = b""
        self.is_open = True
        connection.setblocking(False)

    def send(self, line: str) -> None:
        """Send a line, or as much as fits and the rest with the next; closes if the other side reads nothing."""
        self._unsent += f"{line}\n".encode()
        try:
            self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except OSError as error:
            self.is_open = self.is_open and isinstance(error, BlockingIOError)
        self.is_open = self.is_open and len(self._unsent) <= _MOST_UNSENT

    def receive(self) -> list[bytes]:
        """Return the lines that have arrived; clears `is_open` if the other side has closed, or a line is too long."""
        try:
            data = self.connection.recv(LONGEST)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        *lines, self._partial = (self._partial + data).split(b"\n")
        self.is_open = self.is_open and bool(data) and max(map(len, (*lines, self._partial))) <= LONGEST
        return lines if self.is_open else []

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self.connection.close()


class SecureChannel:
    """An authenticated connection; `receive` and `send` never wait."""

    def __init__(self, lines: _Lines, key: str, own: str, other: str) -> None:
        self._lines, self._key, self._own, self._other = lines, key, own, other
        self._sent = self._received = 0  # number of lines
        self.fileno = lines.fileno  # for selectors

    @property
    def is_open(self) -> bool:
        """False once the other side has closed, reads nothing, or has sent what does not fit."""
        return self._lines.is_open

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a JSON object."""
        body = json.dumps(message)
        self._sent += 1
        self._lines.send(f"{prove(self._key, self._own, str(self._sent), body)} {body}")

    def receive(self) -> list[dict[str, Any]]:
        """Return the objects that have arrived, in order."""
        messages = []
        for line in self._lines.receive():
            proof, _, body = line.decode(errors="replace").partition(" ")
            self._received += 1
            if not is_proof(proof, self._key, self._other, str(self._received), body):
                self._lines.is_open = False
                break
            messages.append(json.loads(body))
        return messages

    def finish(self, seconds: float) -> None:
        """Close once the other side has, or after `seconds`: to close before might lose what was sent."""
        with contextlib.suppress(OSError):
            self._lines.connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + seconds
        while self.is_open and (left := deadline - time.monotonic()) > 0:
            select.select([self], [], [], left)
            self.receive()
        self.close()

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()


class Stranger:
    """The leader's side of a connection that has not proved anything yet."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines, self._nonce = _Lines(connection), secrets.token_hex(16)
        self.fileno, self.arrival = self._lines.fileno, time.monotonic()
        self._lines.send(_HELLO + self._nonce)

    def receive(self, secret: str) -> tuple[SecureChannel, dict[str, Any]] | None:
        """Return the channel and the first message of a member; None until it is complete.

        `ForeignError` if it does not know the `secret`, `ConnectionError` if it has closed.
        """
        lines = self._lines.receive()
        if not lines:
            if not self._lines.is_open:
                raise ConnectionError("It has closed the connection.")
            return None
        body, _, proof = lines[0].decode(errors="replace").rpartition(" ")
        if not is_proof(proof, secret, "join", self._nonce, body):
            self._lines.send(_REJECTED)
            raise ForeignError("It does not know the secret of the job.")
        hello = json.loads(body)
        nonce = hello.pop("nonce")
        self._lines.send(prove(secret, "admit", nonce, self._nonce))
        return SecureChannel(self._lines, prove(secret, "key", nonce, self._nonce), "leader", "member"), hello

    def close(self) -> None:
        """Close the connection."""
        self._lines.close()


def join(connection: socket.socket, secret: str, hello: Mapping[str, Any], seconds: float) -> SecureChannel:
    """Prove to the leader that this supervisor belongs to the job, check its proof, and return the channel.

    `ForeignError` if it does not know the secret or is none, another `OSError` if it does not answer in time.
    """
    if connection.getsockname() == connection.getpeername():  # a free local port can connect to itself
        raise ConnectionRefusedError("no leader listens there")
    deadline, nonce = time.monotonic() + seconds, secrets.token_hex(16)
    challenge = _read_line(connection, deadline)
    if not challenge.startswith(_HELLO):
        raise ForeignError("another program uses the port")
    body, leader_nonce = json.dumps({"nonce": nonce, **hello}), challenge.removeprefix(_HELLO)
    connection.sendall(f"{body} {prove(secret, 'join', leader_nonce, body)}\n".encode())
    if not is_proof(_read_line(connection, deadline), secret, "admit", nonce, leader_nonce):
        raise ForeignError("it has another secret of the job")
    return SecureChannel(_Lines(connection), prove(secret, "key", nonce, leader_nonce), "member", "leader")


def _read_line(connection: socket.socket, deadline: float) -> str:
    """Read a line, and no byte after it."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(line) > LONGEST:
            raise ConnectionResetError("the connection was closed")
        line += byte
    return line[:-1].decode(errors="replace")
