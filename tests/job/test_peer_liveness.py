"""A process that has lost another ends with a sentence; one whose others are there, or have said farewell, goes on."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile

import pytest

from tests.train_helpers import ROOT
from zaya_jax.job.relay import private_address, relay
from zaya_jax.run.peer import Peer

# The threads have a clock that stands still unless `pass_time` sets it, so that no peer is late on a busy machine.
CODE = """
import socket, sys, threading, time
from collections import Counter
from types import SimpleNamespace
from zaya_jax.job import peer_liveness
from zaya_jax.run.peer import Peer
from zaya_jax.job.peer_liveness import PeerLiveness

now, looks = 0.0, Counter()
def read_clock():
    looks[threading.get_ident()] += 1
    return now
peer_liveness.time = SimpleNamespace(monotonic=read_clock, sleep=time.sleep)
peer_liveness._EXIT_SECONDS = 60.0

def pass_time(seconds=0.0):
    "Set the clock forward, and wait until each thread has acted on what it saw then: it looks twice at most a time."
    global now
    now += seconds
    before = Counter(looks.copy())
    while sum(count - before[thread] >= 6 for thread, count in looks.copy().items()) < len(watches):
        time.sleep(0.01)

def go_on():
    print("still here")
    sys.exit()

ours, theirs = socket.socketpair()
watches = [PeerLiveness([Peer(ours, 3, "node3")], {limit})]
{act}
time.sleep(60)
"""


def run(act, limit=0.5):
    done = subprocess.run([sys.executable, "-c", CODE.format(act=act, limit=limit)], cwd=ROOT, timeout=120,
                          capture_output=True, text=True, check=False)  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("act", "message"),
    [
        ("pass_time(0.6)", "sent no heartbeat for 0.5 s"),
        ("theirs.close()", "was lost: its connection closed"),
        ("theirs.sendall(b'\\n'); theirs.close()", "was lost: its connection closed"),
    ],
)
def test_a_process_that_is_lost_ends_the_others(act, message):
    status, out, err = run(act)
    assert (status, out) == (1, "")
    assert err.startswith(f"Stopped: Process 3 on node3 {message}. Start all processes again with the same command")
    assert err.count("\n") == 1


def test_those_that_are_heard_go_on():
    act = """
watches.append(PeerLiveness([Peer(theirs, 0, "node0")], 0.5))
for _ in range(5):
    pass_time(0.2)  # each sends
    pass_time()  # and hears
go_on()
"""
    assert run(act) == (0, "still here\n", "")


def test_a_farewell_is_not_a_loss():
    act = "theirs.sendall(b'\\ndone\\n'); theirs.close(); pass_time(); pass_time(0.6); go_on()"
    assert run(act) == (0, "still here\n", "")


def test_one_that_has_to_end_says_so_for_all():
    assert run("theirs.sendall(b'!2 Error: the disk is full.\\n')") == (2, "", "Error: the disk is full.\n")


def test_the_last_word_is_left_to_the_first_and_reaches_the_others():
    act = """
def read():
    heard = b""
    while data := theirs.recv(100): heard += data
    threading.Thread(target=watches[0].leave, args=["second", 3]).start()
    time.sleep(0.2)  # in which it would print
    print(*filter(None, heard.decode().split("\\n")), flush=True)  # without heartbeats, which may follow
    theirs.close()  # which ends the first's wait
threading.Thread(target=read).start()
watches[0].leave("first", 2)
"""
    assert run(act, limit=60.0) == (2, "!2 first\n", "first\n")


def test_a_process_ends_even_if_nobody_reads_what_it_prints():
    act = """
import os, sys
reader, writer = os.pipe()
os.dup2(writer, 1), os.dup2(writer, 2), os.close(reader)
sys.stdout = os.fdopen(1, "w")
sys.stdout.write("unread")
theirs.sendall(b"!7 lost\\n")
"""
    assert run(act) == (7, "", "")


# --- the connection to the coordination service, which relays let outlast it -------------------------------------


@contextlib.contextmanager
def relayed():
    """The path of a service, and a connection of a client to it, through the relays of two processes."""
    with socket.create_server(("127.0.0.1", 0)) as server, private_address() as path, private_address() as near:
        tunnel = socket.create_connection(server.getsockname())
        relay(tunnel, near, is_service_here=False)
        relay(server.accept()[0], path, is_service_here=True)
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(60)
            client.connect(near)
            assert os.stat(os.path.dirname(near)).st_mode & 0o777 == 0o700
            yield path, client


@contextlib.contextmanager
def service(path):
    with socket.socket(socket.AF_UNIX) as server:
        server.settimeout(60)
        server.bind(path)
        server.listen()
        with server.accept()[0] as connection:
            connection.settimeout(60)
            yield connection


def test_a_connection_waits_for_the_service_and_outlasts_it():
    with relayed() as (path, client):
        client.sendall(b"first")  # before there is a service
        with service(path) as far:
            assert far.recv(100) == b"first"
            far.sendall(b"answer")
            assert client.recv(100) == b"answer"
        client.settimeout(0.3)
        with pytest.raises(TimeoutError):
            client.recv(100)
        for _ in range(3):
            client.sendall(b"into the void")
        with pytest.raises(TimeoutError):
            client.recv(100)


def test_the_service_learns_of_the_end():
    with relayed() as (path, client), service(path) as far:
        client.close()
        assert far.recv(100) == b""


def test_lines_to_a_peer_that_does_not_read_arrive_whole_and_in_order():
    first, second = socket.socketpair()
    sender, receiver = Peer(first), Peer(second)
    lines = [f"{number} {'x' * (number * 97 % 5000)}" for number in range(400)]  # more than the sockets hold
    received = []
    for line in lines:
        sender.send(line)
    for _ in range(1000):
        received += filter(None, receiver.receive())
        sender.send("")
    assert received == lines
    sender.close()
    receiver.close()


def test_a_full_disk_of_temporary_files_keeps_no_process_from_joining(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with private_address() as path, socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        assert os.stat(os.path.dirname(path)).st_mode & 0o777 == 0o700
