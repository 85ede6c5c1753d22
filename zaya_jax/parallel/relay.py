"""A relay to jax's coordination service that keeps connections open when the service is gone.

jax's client aborts its process with a C++ stack trace as soon as its connection closes, for example when process 0 is
killed. Behind the relay it only sees a service that does not answer, so `PeerLiveness` can end the process with a
message.
"""

import contextlib
import socket
import threading
import time


def relay(host: str, port: int) -> str:
    """Forward a local port to `host` and `port` without ever closing a connection; returns the local HOST:PORT."""
    server = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(server, host, port), name="relay", daemon=True).start()
    return "{}:{}".format(*server.getsockname())


def _accept(server: socket.socket, host: str, port: int) -> None:
    while True:
        downstream, _ = server.accept()
        threading.Thread(target=_forward, args=(downstream, host, port), name="relay", daemon=True).start()


def _forward(downstream: socket.socket, host: str, port: int) -> None:
    while True:
        try:
            upstream = socket.create_connection((host, port))
            break
        except OSError:  # the service does not listen yet, or is gone
            time.sleep(0.1)
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
