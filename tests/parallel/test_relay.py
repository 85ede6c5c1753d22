"""A connection through the relay carries what both sides say, and outlasts the service."""

import socket

import pytest

from tests.parallel.processes_helpers import free_port
from zaya_jax.parallel.relay import relay


def test_a_connection_waits_for_the_service_and_outlasts_it():
    port = free_port()
    host, _, near_port = relay("127.0.0.1", port).rpartition(":")
    with socket.create_connection((host, int(near_port)), timeout=10) as near:
        near.sendall(b"first")  # before there is a service
        with socket.create_server(("127.0.0.1", port)) as server:
            far, _ = server.accept()
            assert far.recv(100) == b"first"
            far.sendall(b"answer")
            assert near.recv(100) == b"answer"
            far.close()
        near.settimeout(0.3)
        with pytest.raises(TimeoutError):
            near.recv(100)
        for _ in range(3):
            near.sendall(b"into the void")
        with pytest.raises(TimeoutError):
            near.recv(100)


def test_the_service_learns_of_the_end():
    with socket.create_server(("127.0.0.1", 0)) as server:
        host, _, port = relay(*server.getsockname()).rpartition(":")
        with socket.create_connection((host, int(port))):
            far, _ = server.accept()
        with far:
            far.settimeout(10)
            assert far.recv(100) == b""
