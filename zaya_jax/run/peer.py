"""A connection between two processes of a job, over which both send lines."""

import contextlib
import selectors
import socket
import time
from collections.abc import Iterable

from zaya_jax.errors import ExitCode, printable

EXIT = "!"  # starts the last line of a process that ends the job, followed by exit status and message
_LONGEST = 2**16  # bytes of a line


class Peer:
    """A non-blocking connection to another process, over which both send lines."""

    def __init__(
        self, connection: socket.socket, process: int | None = None, host: str = "", tunnel: socket.socket | None = None
    ) -> None:
        self.connection = connection
        self.process = process  # index of the other process; None until it has proved that it belongs to the job
        self.host = host  # where it runs, printable
        self.tunnel = tunnel  # a second connection, for the traffic of jax's coordination service
        self.fileno = connection.fileno  # for selectors
        self.unsent = self._partial_line = b""  # what the other side has left no room for; a line that has no end yet
        connection.setblocking(False)

    def __str__(self) -> str:
        return f"{self.process} on {self.host}"

    def send(self, line: str) -> None:
        """Send a line, or as much as fits, and the rest before the next line; the peer timeout detects a lost peer."""
        self.unsent += f"{line}\n".encode(errors="backslashreplace")
        with contextlib.suppress(OSError):
            self.unsent = self.unsent[self.connection.send(self.unsent) :]

    def receive(self) -> list[str] | None:
        """Return the lines received since the last call; None if the other side has closed, or a line is too long."""
        try:
            data = self.connection.recv(_LONGEST)
        except BlockingIOError:
            return []
        except OSError:
            return None
        if not data or len(self._partial_line) > _LONGEST:
            return None
        *lines, self._partial_line = (self._partial_line + data).split(b"\n")
        return [line.decode(errors="replace") for line in lines]

    def close(self) -> None:
        """Close both connections."""
        self.connection.close()
        if self.tunnel is not None:
            self.tunnel.close()


def end_connections(peers: Iterable[Peer], seconds: float, line: str | None = None) -> None:
    """Send a last line and close, once the peers have closed: to close before would reset, and might lose lines."""
    peers = list(peers)
    with selectors.DefaultSelector() as selector:
        for peer in peers:
            selector.register(peer, selectors.EVENT_READ)
            if line is not None:
                peer.send(line)
            with contextlib.suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + seconds
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj.receive() is None:  # pyright: ignore[reportAttributeAccessIssue]
                    selector.unregister(key.fileobj)
    for peer in peers:
        peer.close()


def parse_number(text: str) -> int | None:
    """Return the number that `text` consists of; None if it is anything else, or has over 18 digits."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None


def parse_exit(line: str) -> tuple[int, str]:
    """Parse a line that starts with `EXIT` into an exit status, which is not 0, and a printable message."""
    status, _, sentence = line.removeprefix(EXIT).partition(" ")
    number = parse_number(status) or 0
    return number if 0 < number < 2**8 else ExitCode.STOPPED, printable(sentence)
