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
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def private_address() -> Iterator[str]:
    """Yield the path of a Unix socket that only this user's processes can reach, once somebody has made it."""
    with tempfile.TemporaryDirectory(prefix="zaya_jax_") as folder:
        # The way over the descriptor is short, as such a path must be, and contains nothing that gRPC would decode.
        # It stays open, since gRPC removes the socket at the end, and the number must not mean another folder then.
        yield f"/proc/self/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY)}/service"


def relay_to_service(tunnel: socket.socket, path: str) -> None:
    """In process 0: forward a tunnel to the service at `path`, which need not listen yet."""
    _start(_connect_and_forward, tunnel, path)


def relay_to_process_0(path: str, tunnel: socket.socket) -> None:
    """In the other processes: take a connection at `path`, and forward it to the tunnel without ever closing it."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    _start(_accept_and_forward, server, tunnel)


def _accept_and_forward(server: socket.socket, tunnel: socket.socket) -> None:
    with server:
        client, _ = server.accept()
    _forward(client, tunnel)


def _connect_and_forward(tunnel: socket.socket, path: str) -> None:
    service = socket.socket(socket.AF_UNIX)
    while service.connect_ex(path):
        time.sleep(0.1)
    _forward(tunnel, service)


def _forward(downstream: socket.socket, upstream: socket.socket) -> None:
    _start(_copy_back, upstream, downstream)
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


def _start(action: Callable[..., None], *arguments: object) -> None:
    threading.Thread(target=action, args=arguments, name="relay", daemon=True).start()
