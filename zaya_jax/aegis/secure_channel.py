"""A connection between two supervisors, over which both send JSON that nobody else can forge, change or repeat.

Each line starts with an HMAC under the key of the connection (`run.handshake`), over the direction, the number of the
line and its content: what was recorded or reordered does not fit. Nothing is encrypted, so nothing that is sent is
secret.
"""

import json
from collections.abc import Mapping
from typing import Any

from zaya_jax.run.job_secret import is_proof, prove
from zaya_jax.run.peer import Peer, end_connections

_MOST_UNSENT = 2**16  # bytes that the other side may leave unread


class SecureChannel:
    """An authenticated connection; `receive` and `send` never wait."""

    def __init__(self, peer: Peer, key: str, *, is_leader: bool) -> None:
        """Use the connection to `peer`, which has proved that it belongs to the job; both sides know the `key`."""
        self._peer, self._key = peer, key
        self._own, self._other = ("leader", "member") if is_leader else ("member", "leader")
        self._sent = self._received = 0  # number of lines
        self.is_open = True  # until the other side has closed, reads nothing, or has sent what does not fit
        self.fileno = peer.fileno  # for selectors

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a JSON object."""
        body = json.dumps(message)
        self._sent += 1
        self._peer.send(f"{prove(self._key, self._own, str(self._sent), body)} {body}")
        self.is_open = self.is_open and len(self._peer.unsent) <= _MOST_UNSENT

    def receive(self) -> list[dict[str, Any]]:
        """Return the objects that have arrived, in order."""
        messages: list[dict[str, Any]] = []
        if (lines := self._peer.receive()) is None:
            self.is_open = False
        for line in lines or ():
            proof, _, body = line.partition(" ")
            self._received += 1
            if not is_proof(proof, self._key, self._other, str(self._received), body):
                self.is_open = False
                break
            messages.append(json.loads(body))
        return messages

    def finish(self, seconds: float) -> None:
        """Close once the other side has, or after `seconds`: to close before might lose what was sent."""
        self.is_open = False
        end_connections([self._peer], seconds)

    def close(self) -> None:
        """Close the connection."""
        self.is_open = False
        self._peer.close()
