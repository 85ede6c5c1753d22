"""A relay to jax's coordination service, which neither listens nor is called over the network.

The service listens at a Unix socket in process 0. The client of every other process connects to a Unix socket of its
own; what it sends goes through the `tunnel` to process 0, whose both ends have proved that they belong to the job.

jax's client aborts its process with a C++ stack trace as soon as its connection closes, for example when process 0 is
killed. Behind the relay it only sees a service that does not answer, so `PeerLiveness` can end the process with a
message.
"""

import contextlib
import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator


@contextlib.contextmanager
def private_address() -> Iterator[str]:
    """Yield the path of a Unix socket that only this user's processes can reach, once somebody has made it."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK | os.X_OK) else None  # noqa: S108 (in a private folder)
    # Not where temporary files are, if possible: that disk may be full, or not there for a container.
    with tempfile.TemporaryDirectory(prefix="zaya_jax_", dir=memory) as folder:
        # The way over the descriptor is short, as such a path must be, and contains nothing that gRPC would decode.
        # It stays open, since gRPC removes the socket at the end, and the number must not mean another folder then.
        yield f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY)}/service"


def relay(tunnel: socket.socket, path: str, *, is_service_here: bool) -> None:
    """Forward between a tunnel and the Unix socket at `path`, without ever closing the connection of a client.

    In process 0 (`is_service_here`) the service listens at `path`, or will; in the others the client will connect.
    """
    tunnel.setblocking(True)
    tunnel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # as gRPC does
    local = socket.socket(socket.AF_UNIX)
    if not is_service_here:
        local.bind(path)
        local.listen()
    threading.Thread(target=_run, args=(tunnel, local, path, is_service_here), name="relay", daemon=True).start()


def _run(tunnel: socket.socket, local: socket.socket, path: str, is_service_here: bool) -> None:
    if is_service_here:
        while local.connect_ex(path):
            time.sleep(0.1)
        _forward(tunnel, local)
    else:
        with local:
            client, _ = local.accept()
        _forward(client, tunnel)


def _forward(downstream: socket.socket, upstream: socket.socket) -> None:
    threading.Thread(target=_copy_back, args=(upstream, downstream), name="relay", daemon=True).start()
    with downstream, upstream, contextlib.suppress(OSError):
        try:
            while data := downstream.recv(2**16):
                with contextlib.suppress(OSError):  # the service is gone, but `downstream` must not notice
                    upstream.sendall(data)
        finally:
            upstream.shutdown(socket.SHUT_RDWR)  # `close` alone does not wake `_copy_back`, which reads it


def _copy_back(upstream: socket.socket, downstream: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := upstream.recv(2**16):
            downstream.sendall(data)
