"""A port of this machine that nothing else takes before a job listens there."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def reserved_port() -> Iterator[str]:
    """Yield HOST:PORT of the loopback interface, where a process that knows it can listen during the block."""
    with socket.socket() as bound:
        # The system gives a bound port to nobody who asks for any; who names it can share it, unless one listens.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", 0))
        yield "{}:{}".format(*bound.getsockname())
