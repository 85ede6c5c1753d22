"""Rendezvous of the processes of a job: all arrive, or each reports which process is missing, lost or duplicated."""

import contextlib
import errno
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.job.processes_helpers import free_port
from zaya_jax.errors import InputError, PeersMissing
from zaya_jax.job import rendezvous
from zaya_jax.job.rendezvous import Job, connect_processes
from zaya_jax.run.job_secret import secret_path
from zaya_jax.run.launcher import split_address
from zaya_jax.run.peer import end_connections


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Where process 0 hands on the secret."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("ZAYA_JOB_SECRET", raising=False)
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def outcome(job, seconds=0.6):
    """Numbers of the processes that one is connected to afterwards, or the sentence it is refused with."""
    try:
        peers = connect_processes(job, seconds)
    except InputError as error:
        return str(error)
    numbers = [peer.process for peer in peers]
    for peer in peers:
        peer.close()
    return numbers


def meeting(numbers, processes, seconds=0.6, port=None, host="127.0.0.1"):
    """Outcomes of processes of these `numbers`, each with its count of `processes`."""
    port = port or free_port()
    counts = [processes] * len(numbers) if isinstance(processes, int) else processes
    with ThreadPoolExecutor(len(numbers)) as pool:
        jobs = [Job(host, port, "--coordinator", count, number) for number, count in zip(numbers, counts, strict=True)]
        return list(pool.map(lambda job: outcome(job, seconds), jobs))


@settings(max_examples=8, deadline=None)
@given(st.integers(1, 4).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=n))))
def test_all_meet_or_are_told_the_number_that_is_wrong(drawn):
    processes, others = drawn
    numbers = [0, *others][:processes]
    twice = {number for number in numbers if numbers.count(number) > 1}
    missing = [number for number in range(processes) if number not in numbers]
    outcomes = meeting(numbers, processes, 2 if missing else 20)
    if twice:  # of several, the first to be seen; those that come later may meet each other, and miss the rest
        messages = [str(outcome_text) for outcome_text in outcomes]
        assert sum(any(f"have --process {number}," in text for number in twice) for text in messages) >= 2, messages
        assert all(re.search("Two processes|process(es)? 0", text, re.IGNORECASE) for text in messages), messages
    elif missing:
        listed, came = (", ".join(map(str, some)) for some in (missing, sorted(numbers)))
        for message in outcomes:
            assert f"Process{'es' * (len(missing) > 1)} {listed} of {processes} did not reach --coordinator" in message
            assert f" {came} did" in message
    else:
        assert outcomes == [[0] if number else list(range(1, processes)) for number in numbers]


def test_another_number_of_processes_is_told_to_all():
    for said in meeting([0, 1], [2, 3], 20):
        assert "Process 1 on " in said
        assert "--processes 3, but process 0 with --processes 2" in said


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as other, pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_ANSWER", 0.2)
        port = other.getsockname()[1]
        assert f"--coordinator 127.0.0.1:{port}: Address already in use" in outcome(
            Job("127.0.0.1", port, "--coordinator", 2, 0)
        )
        launched = outcome(Job("127.0.0.1", port, "Slurm's coordinator", 2, 0))
        assert f"Slurm's coordinator 127.0.0.1:{port}" in launched
        assert "JAX_COORDINATOR_PORT" in launched


def test_two_that_both_find_the_port_in_use_at_first_are_told_the_number_that_they_share(monkeypatch):
    listen, refused = socket.create_server, []

    def busy(address, **options):
        if len(refused) < 2:
            refused.append(address)
            raise OSError(errno.EADDRINUSE, "Address already in use")
        return listen(address, **options)

    monkeypatch.setattr(socket, "create_server", busy)
    for said in meeting([0, 0], 2, 20):
        assert "Two processes have --process 0," in said


@pytest.mark.parametrize("process", [0, 1])
def test_the_secret_of_another_users_start_is_waited_for(monkeypatch, tmp_path, process):
    """In a team's run folder: that start has the port of this job, or left its secret there."""
    monkeypatch.setattr(rendezvous, "_ANSWER", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve():
            with contextlib.suppress(OSError):  # the test has ended
                while True:
                    connection, _ = other.accept()
                    connection.sendall(b"zaya_jax 00112233\n")
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        job = Job("127.0.0.1", other.getsockname()[1], "--coordinator", 2, process, tmp_path)
        path = secret_path(tmp_path, job.address)
        path.write_text("theirs")
        path.chmod(0o644)
        with pytest.raises(PeersMissing, match=re.escape(str(path)) if process else "Address already in use"):
            connect_processes(job, 0.3)


def test_an_address_where_nobody_listens_is_named():
    (message,) = meeting([1], 2)
    assert "Process 1 could not reach process 0 at --coordinator 127.0.0.1:" in message
    assert "Connection refused" in message


@pytest.mark.parametrize(
    ("answer", "reason"),
    [(None, "timed out"), (b"", "the connection was closed"), (b"SSH-2.0\r\n", "another program uses the port")],
)
def test_a_program_that_is_not_process_0_is_not_waited_for_without_end(monkeypatch, answer, reason):
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as other:

        def serve():
            with contextlib.suppress(OSError):  # the test has ended
                while answer is not None:
                    connection, _ = other.accept()
                    connection.sendall(answer)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        (message,) = meeting([1], 2, 0.1, other.getsockname()[1])
        assert "could not reach process 0 at --coordinator" in message
        assert f"({reason})" in message


@pytest.mark.parametrize("bad", ["127.0.0.1", "[::1]:none", "localhost:70000"])
def test_a_bind_address_without_a_port_is_refused(monkeypatch, bad):
    monkeypatch.setenv("JAX_COORDINATOR_BIND_ADDRESS", bad)
    message = outcome(Job("127.0.0.1", free_port(), "--coordinator", 2, 0))
    assert message == f"JAX_COORDINATOR_BIND_ADDRESS is {bad!r}, but must be HOST:PORT."


@pytest.mark.parametrize("host", ["node1..cluster", "n" * 64])
def test_what_cannot_be_a_host_is_named(host):
    message = outcome(Job(host, 9999, "--coordinator", 2, 1))
    assert f"--coordinator {host}:9999 has an invalid host name" in message


@pytest.mark.parametrize("text", ["[::1]:80", "::1:80"])
def test_brackets_stand_around_an_ipv6_address_that_jax_gets(text):
    host, port = split_address(text, "--coordinator")
    assert (host, port, Job(host, port, "", 2, 0).address) == ("::1", 80, "[::1]:80")


def test_an_unknown_host_is_told_at_once_but_in_kubernetes_where_names_come_late(monkeypatch):
    resolve, calls = socket.getaddrinfo, []

    def unknown(host, *rest, **options):
        calls.append(host)
        if host == "nowhere":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if host == "busy":
            if len(calls) <= 3:
                raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
            host = "127.0.0.1"
        if host == "late":
            host = "127.0.0.1" if len(calls) > 3 else unknown("nowhere")
        return resolve(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    for said in meeting([0, 1], 2, 60, host="nowhere"):
        assert "The host of --coordinator nowhere:" in said
    assert calls == ["nowhere"] * 2
    calls.clear()
    assert meeting([0, 1], 2, 60, host="busy") == [[1], [0]]
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    calls.clear()
    assert meeting([0, 1], 2, 60, host="late") == [[1], [0]]


def test_a_name_that_leads_to_process_0_only_later_is_waited_for(monkeypatch, capfd):
    resolve, calls = socket.getaddrinfo, []

    def moving(host, *rest, **options):
        calls.append(host)
        return resolve("127.0.0.1" if len(calls) > 4 else "203.0.113.1", *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", moving)
    port = free_port()
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(outcome, Job("moved", port, "--coordinator", 2, 0), 60)
        while len(calls) < 4:
            assert not first.done()
            time.sleep(0.01)
        assert outcome(Job("moved", port, "--coordinator", 2, 1), 60) == [0]
        assert first.result() == [1]
    assert capfd.readouterr().err.count("moved is no address of this host yet") == 1


def test_one_that_is_lost_before_the_rest_have_come_is_named():
    port = free_port()

    def visit():
        rendezvous._enter(job._replace(process=1), "lines", time.monotonic(), 10).close()

    job = Job("127.0.0.1", port, "--coordinator", 3, 0)
    threading.Thread(target=visit).start()
    assert "was lost before all 3 processes had connected" in outcome(job, 10)


def test_the_port_is_free_while_connections_are_open():
    job = Job("127.0.0.1", free_port(), "--coordinator", 2, 0)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(connect_processes, job, 20)
        second = pool.submit(connect_processes, job._replace(process=1), 20)
        (other,), (server,) = first.result(), second.result()
    with socket.create_server(("127.0.0.1", job.port)):
        assert other.process == 1
        assert other.host == socket.gethostname()
        other.send("still open")
        time.sleep(0.1)
        assert (server.receive() or [])[-1:] == ["still open"]
    threading.Thread(target=end_connections, args=([server], 5, "farewell")).start()
    time.sleep(0.1)
    assert other.receive() == ["farewell"]
    assert other.receive() is None
    other.close()
