"""Whatever strangers send to process 0 or answer in its place, they cost the job nothing and learn nothing of it."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.job.processes_helpers import free_port
from tests.train_helpers import ROOT
from zaya_jax.errors import InputError, PeersMissing
from zaya_jax.job import rendezvous
from zaya_jax.job.rendezvous import Job, connect_processes
from zaya_jax.job.stop_step import StopStep
from zaya_jax.run import listening
from zaya_jax.run.job_secret import VARIABLE, prove
from zaya_jax.run.peer import EXIT, Peer, parse_exit

SECRET = "0123456789abcdef"  # noqa: S105
HELLO = {"process": 1, "processes": 2, "host": "evil\x1b[31m\nhost", "channel": "lines", "nonce": "0" * 32}


@pytest.fixture(scope="module", autouse=True)
def secret():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(VARIABLE, SECRET)
        yield


def hello(**changes):
    return json.dumps(HELLO | changes)


# Lines that a stranger might send; those with a right proof are of another connection.
LINES = st.one_of(
    st.binary(max_size=200),
    st.sampled_from([
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\n", b"\n" * 1000, b"\xff\xfe\x00", b"x" * 200_000,
        b"[" * 60_000 + b"\n",
        b'zaya_jax {"process": 1e999, "processes": 2, "host": "x"}\n', b'{"process": ' + b"9" * 5000 + b"}\n",
        f"{hello()} {'é' * 64}\n".encode(), f"{hello()} {'0' * 64}\n".encode(), f"{hello(process=-1)} \n".encode(),
        f"{hello()} {prove(SECRET, 'enter', '0' * 32, hello())}\n".encode(),
        f"{hello()} {prove('', 'enter', '', hello())}\n".encode(), b"ready\n", b"!0 \n", b"missing x\n",
    ]),
)  # fmt: skip


def visit(port, content):
    """Send `content` to process 0 as a stranger; what it answers."""
    received = b""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(1000):
                received += data
    except OSError:  # it may close the connection before it has read all
        pass
    return received


@settings(max_examples=15, deadline=None, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
@given(st.lists(LINES, min_size=1, max_size=8))
def test_strangers_neither_end_nor_enter_a_job_nor_learn_of_it(contents):
    job = Job("127.0.0.1", free_port(), "--coordinator", 2, 0)
    with process_0(job, 20) as first:
        held = [socket.create_connection(("127.0.0.1", job.port)) for _ in contents]
        for connection, content in zip(held, contents, strict=True):
            assert visit(job.port, content)[42:] in (b"", b"rejected\n")
            connection.sendall(content[: len(content) // 2])  # and waits
        assert not first.done()
        (accepted,) = join(first, job)
    (other,) = first.result()
    assert (other.process, other.host, accepted.process) == (1, socket.gethostname(), 0)
    for connection in held:
        connection.close()


@contextlib.contextmanager
def process_0(job, seconds=60):
    """The connections of process 0 of a job, in another thread; it listens already."""
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(connect_processes, job, seconds)
        while not visit(job.port, b""):
            time.sleep(0.01)
        yield first


def join(first, job, **changes):
    """Let process 1 join, and close all connections."""
    peers = connect_processes(job._replace(process=1, **changes), 60)
    for peer in (*first.result(), *peers):
        peer.connection.shutdown(socket.SHUT_RDWR)
        peer.close()
    return peers


def forwarded(port, sent):
    """A port whose connections are passed on to `port`; what the one that connects says is added to `sent`."""
    server = socket.create_server(("127.0.0.1", 0))

    def copy(source, target, lines):
        while data := source.recv(1000):
            lines.append(data)
            target.sendall(data)

    def accept():
        while True:
            near, _ = server.accept()
            far = socket.create_connection(("127.0.0.1", port))
            sent.append(([], []))
            for source, target, lines in ((near, far, sent[-1][0]), (far, near, sent[-1][1])):
                threading.Thread(target=copy, args=(source, target, lines), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return server.getsockname()[1]


def test_what_was_recorded_opens_no_later_start(monkeypatch):
    job, sent = Job("127.0.0.1", free_port(), "--coordinator", 2, 0), []
    with process_0(job) as first:
        join(first, job, port=forwarded(job.port, sent))
    assert len(sent) == 2
    assert sent[0][1][-1].endswith(b"ready\n")  # so that it was admitted
    with process_0(job, 2) as again:
        for ours, _ in sent:
            assert visit(job.port, b"".join(ours)).endswith(b"\nrejected\n")
        with pytest.raises(
            InputError, match=r"Process 1 of 2 did not reach .* rejected 2 connections without the secret"
        ):
            again.result()
        # Nor does a program that answers as process 0 did deceive process 1.
        with socket.create_server(("127.0.0.1", 0)) as fake:

            def answer():
                connection, _ = fake.accept()
                connection.sendall(b"".join(sent[0][1]))

            threading.Thread(target=answer, daemon=True).start()
            with pytest.raises(InputError, match=r"could not reach process 0 .*secret"):
                connect_processes(job._replace(process=1, port=fake.getsockname()[1]), 0)


MEET = """
import resource, sys
from zaya_jax.errors import InputError
from zaya_jax.job.rendezvous import Job, connect_processes
most, port, process, seconds = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
try:
    print("connected to", *connect_processes(Job("127.0.0.1", port, "--coordinator", 2, process), seconds))
except InputError as error:
    print(type(error).__name__, error)
"""


def start(process, port, descriptors=1024, seconds=60, **environment):
    command = [sys.executable, "-c", MEET, str(descriptors), str(port), str(process), str(seconds)]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, env={**os.environ, **environment})


@pytest.mark.parametrize("descriptors", [32, 256])  # 32 are used up before there are too many strangers
def test_a_flood_of_connections_keeps_nobody_out(descriptors):
    port = free_port()
    first = start(0, port, descriptors)
    while not visit(port, b""):
        time.sleep(0.02)
    held = [socket.create_connection(("127.0.0.1", port), timeout=20) for _ in range(300)]
    second = start(1, port)
    assert first.communicate(timeout=100)[0].startswith("connected to 1 on ")
    assert second.communicate(timeout=100)[0].startswith("connected to 0 on ")
    for connection in held:
        connection.close()


def test_a_process_with_another_secret_says_so_and_ends_nothing():
    job = Job("127.0.0.1", free_port(), "--coordinator", 2, 0)
    with process_0(job) as first:
        output, _ = start(1, job.port, seconds=1, **{VARIABLE: "another"}).communicate(timeout=100)
        assert f"Process 1 could not reach process 0 at {job.coordinator} within 1 s (it has another" in output
        assert SECRET not in output
        join(first, job)


def test_process_0_listens_at_the_named_address_alone():
    job = Job("127.0.0.1", free_port(), "--coordinator", 2, 0)
    with process_0(job, 1) as first:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.2", job.port))
        with pytest.raises(InputError, match=r"Process 0 listened at 127\.0\.0\.1;"):
            first.result()


@pytest.mark.parametrize(("host", "addresses"), [
    ("127.0.1.1", ["127.0.1.1"]), ("localhost", ["127.0.0.1"]), ("node1", ["127.0.1.1"]),
    ("here", ["127.0.1.1", "::1"]), ("both", ["127.0.0.1", "10.0.0.1"]),
])  # fmt: skip
def test_a_name_that_only_its_own_host_reaches_is_said_at_once(monkeypatch, capfd, host, addresses):
    monkeypatch.setattr(listening, "resolve", lambda *_: addresses)
    port = free_port()
    with pytest.raises(PeersMissing):
        connect_processes(Job(host, port, "--coordinator", 2, 0), 0)
    message = f"{host} is {' and '.join(addresses)} on this host"
    assert (message in capfd.readouterr().err) == (host in ("node1", "here"))


def test_an_address_of_another_host_is_named(monkeypatch):
    job = Job("203.0.113.1", free_port(), "--coordinator", 2, 0)
    with pytest.raises(PeersMissing, match=r"203\.0\.113\.1 is no address of this host.*JAX_COORDINATOR_BIND_ADDRESS"):
        connect_processes(job, 1)
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", f"127.0.0.1:{job.port}")  # the address is translated
    with ThreadPoolExecutor(1) as pool:
        join(pool.submit(connect_processes, job, 60), job, host="127.0.0.1")


def test_strangers_are_dropped_when_their_time_is_over(monkeypatch):
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.1)
    job = Job("127.0.0.1", free_port(), "--coordinator", 2, 0)
    with process_0(job) as first:
        with socket.create_connection(("127.0.0.1", job.port), timeout=20) as silent:
            assert silent.recv(100).startswith(b"zaya_jax ")
            assert silent.recv(100) == b""
        assert not first.done()
        monkeypatch.setattr(rendezvous, "_PATIENCE", 10)
        join(first, job)


@given(st.sampled_from(["stop", "finished?", "finished", "stop-after", EXIT, ""]),
       st.one_of(st.text(), st.integers().map(str), st.sampled_from(["1e999", "٣", "-1", "1" * 5000])))  # fmt: skip
def test_no_line_is_an_error(kind, text):
    status, sentence = parse_exit(f"{EXIT}{text}")
    assert 0 < status < 256
    assert sentence.isprintable()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        StopStep([Peer(ours, 1)]).receive(f"{kind} {text}")
