"""How two processes prove to each other, over a new connection, that they know the secret of their job.

    server:  zaya_jax NONCE
    client:  {"process": 1, "nonce": NONCE, ...} PROOF
    server:  admitted PROOF

Each proof covers the nonce of the other side, so recorded lines are worthless. Strangers learn nothing else, and what
they send costs only their own connections.
"""

import errno
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from typing import Any

from zaya_jax.run.job_secret import is_proof, prove
from zaya_jax.run.peer import Peer

_HELLO = "zaya_jax "  # starts the server's first line
_ADMITTED = "admitted "  # starts its answer to a proof
_REJECTED = "rejected"  # its answer to a wrong proof
_MOST_STRANGERS = 64  # connections at a time
_LONGEST = 2**14  # bytes of a line of the server
_RETRY = 0.2  # seconds


class NoProofError(OSError):
    """The server has another secret; `is_said` if it has said so itself."""

    def __init__(self, *, is_said: bool) -> None:
        super().__init__("it has another secret of the job")
        self.is_said = is_said


class Strangers:
    """The server's connections that have not proved anything yet."""

    def __init__(
        self, selector: selectors.BaseSelector, secret: str, admit: Callable[[Peer, dict[str, Any], str], object]
    ) -> None:
        """Call `admit` with each peer that has the `secret`, its first message, and a key for this connection alone.

        The data of what this registers with `selector` are functions, to be called with the file object.
        """
        self._selector, self.secret, self._admit = selector, secret, admit
        self._waiting: dict[Peer, tuple[str, float]] = {}  # nonce and time of arrival, the oldest first
        self.rejected, self.last = 0, ""  # number of wrong proofs, and where the last one came from

    def accept(self, listener: socket.socket) -> None:
        """Take the next connection to `listener`, instead of the oldest one if there are too many."""
        try:
            connection, address = listener.accept()
        except OSError:  # no file descriptor is left, or it has gone again
            time.sleep(0 if self._waiting else _RETRY)
            self.drop(*list(self._waiting)[:1])
            return
        if len(self._waiting) >= _MOST_STRANGERS:
            self.drop(next(iter(self._waiting)))
        peer, nonce = Peer(connection, host=address[0]), secrets.token_hex(16)
        self._waiting[peer] = nonce, time.monotonic()
        self._selector.register(peer, selectors.EVENT_READ, self._receive)
        peer.send(_HELLO + nonce)

    def drop_late(self, seconds: float) -> None:
        """Close connections that have proved nothing for so long."""
        now = time.monotonic()
        self.drop(*[peer for peer, (_, arrival) in self._waiting.items() if now - arrival > seconds])

    def close(self) -> None:
        """Close all."""
        self.drop(*self._waiting)

    def drop(self, *strangers: Peer) -> None:
        """Close these connections."""
        for stranger in strangers:
            self._forget(stranger)
            stranger.close()

    def _forget(self, stranger: Peer) -> str:
        self._selector.unregister(stranger)
        return self._waiting.pop(stranger)[0]

    def _receive(self, peer: Peer) -> None:
        if peer not in self._waiting:  # dropped just now
            return
        lines = peer.receive()
        if lines is None:
            self.drop(peer)
        if not lines:
            return
        body, _, proof = lines[0].rpartition(" ")
        nonce, _ = self._waiting[peer]
        if is_proof(proof, self.secret, "enter", nonce, body):
            self._forget(peer)
            hello = json.loads(body)
            peer.send(_ADMITTED + prove(self.secret, "admit", hello["nonce"]))
            self._admit(peer, hello, prove(self.secret, "key", hello["nonce"], nonce))
            return
        self.rejected, self.last = self.rejected + 1, peer.host
        peer.send(_REJECTED)
        self.drop(peer)


def exchange_proofs(
    connection: socket.socket, find_secret: Callable[[], str], hello: Mapping[str, Any], deadline: float
) -> str:
    """Prove to the server that this process has the secret of the job, check its proof, and return the key.

    `find_secret` is called once the server is there. `NoProofError` if its secret is another one, another `OSError` if
    it does not answer until the `deadline` of `time.monotonic`, or is none.
    """
    if connection.getsockname() == connection.getpeername():  # a free local port can connect to itself
        raise OSError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    challenge = read_line(connection, deadline)
    if not challenge.startswith(_HELLO):
        raise OSError("another program uses the port")
    secret, nonce = find_secret(), secrets.token_hex(16)
    body, server_nonce = json.dumps({**hello, "nonce": nonce}), challenge.removeprefix(_HELLO)
    connection.sendall(f"{body} {prove(secret, 'enter', server_nonce, body)}\n".encode())
    answer = read_line(connection, deadline)
    if not is_proof(answer.removeprefix(_ADMITTED), secret, "admit", nonce):
        raise NoProofError(is_said=answer == _REJECTED)
    return prove(secret, "key", nonce, server_nonce)


def read_line(connection: socket.socket, deadline: float) -> str:
    """Read a line until the `deadline` of `time.monotonic`, and no byte after it; `OSError` if there is none."""
    line = b""
    while not line.endswith(b"\n"):
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(line) > _LONGEST:
            raise OSError("the connection was closed")
        line += byte
    return line[:-1].decode(errors="replace")
