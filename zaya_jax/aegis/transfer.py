"""A connection over which one supervisor asks another for files; both have proved that they belong to the job.

    client:  PROOF {"step": 40, "file": "..."}
    server:  PROOF SIZE, as many bytes, PROOF

The last proof is of the SHA-256 of the bytes, so nobody between the two can change them. SIZE is -1 if there is no such
file. Each proof is of the number of its request, too. Nothing is encrypted.
"""

import hashlib
import io
import json
import socket
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from zaya_jax.run.handshake import read_line
from zaya_jax.run.job_secret import is_proof, prove

_CHUNK = 2**20  # bytes in memory at a time
_SECONDS = 30.0  # that the other side may take for the next bytes


class Transfer:
    """Sends or receives files, one after the other, in a thread that may wait; the key is the connection's."""

    def __init__(self, connection: socket.socket, key: str) -> None:
        self._connection, self._key, self._number = connection, key, 0
        connection.settimeout(_SECONDS)

    def ask(self, request: Mapping[str, Any], write: Callable[[bytes], object], most: int) -> bool:
        """Ask for a file of at most `most` bytes, and `write` it; False if there is none.

        `OSError` if the other side is slow or lost, or sends what it should not; what was written is then worthless.
        """
        self._number += 1
        self._send("ask", json.dumps(request))
        size = int(self._receive("size"))
        if size < 0:
            return False
        if size > most:
            raise OSError(f"it sends {size:,} bytes instead of at most {most:,}")
        checksum, left = hashlib.sha256(), size
        self._connection.settimeout(_SECONDS)
        while left:
            if not (data := self._connection.recv(min(left, _CHUNK))):
                raise OSError("the connection was closed")
            checksum.update(data)
            write(data)
            left -= len(data)
        self._receive("sent", checksum.hexdigest())
        return True

    def ask_json(self, request: Mapping[str, Any], most: int) -> Any:
        """Ask for a list or another JSON value; None if there is none."""
        content = io.BytesIO()
        return json.loads(content.getvalue()) if self.ask(request, content.write, most) else None

    def answer(self, find: Callable[[Mapping[str, Any]], tuple[IO[bytes], int] | None]) -> None:
        """Answer the next request with the file and the size that `find` returns; `OSError` if none comes in time."""
        self._number += 1
        opened = find(json.loads(self._receive("ask")))
        if opened is None:
            self._send("size", "-1")
            return
        file, left = opened
        with file:
            self._send("size", str(left))
            checksum = hashlib.sha256()
            while left:
                if not (data := file.read(min(left, _CHUNK))):
                    raise OSError("the file became shorter")
                checksum.update(data)
                self._connection.sendall(data)
                left -= len(data)
        self._send("sent", "", checksum.hexdigest())

    def _send(self, kind: str, text: str, *more: str) -> None:
        self._connection.settimeout(_SECONDS)
        self._connection.sendall(f"{prove(self._key, kind, str(self._number), text, *more)} {text}\n".encode())

    def _receive(self, kind: str, *more: str) -> str:
        proof, _, text = read_line(self._connection, time.monotonic() + _SECONDS).partition(" ")
        if not is_proof(proof, self._key, kind, str(self._number), text, *more):
            raise OSError("it sends what does not fit")
        return text
