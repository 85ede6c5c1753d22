"""The leader with many supervisors, each a connection of this process."""

import contextlib
import dataclasses
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zaya_jax.aegis import leader
from zaya_jax.aegis.events import EVENTS, read_events
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.leader import BEAT, Leader, Setup
from zaya_jax.aegis.roster import Report, Roster, State
from zaya_jax.aegis.secure_channel import SecureChannel
from zaya_jax.run import fencing
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.handshake import exchange_proofs
from zaya_jax.run.peer import Peer

SECRET = secrets.token_hex()


class Led:
    """A leader in a thread, for a job of one node."""

    def __init__(self, folder: Path, name: str, nodes: int = 1) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=nodes)
        self.job = {"nodes": nodes, "smaller": [], "spares": 0, "processes": 1, "command": "c"}
        self.leader = Leader([self.listener], SECRET, Setup(str(folder), self.job, 60.0, name))
        self.thread = threading.Thread(target=self.leader.run)
        self.thread.start()
        self.channels = list[SecureChannel]()
        self.reports = [Report(index, f"{name}-{index}", f"{name}{index}", self.job) for index in range(nodes)]

    def join(self) -> None:
        for report in self.reports:
            connection = socket.create_connection(self.listener.getsockname())
            key = exchange_proofs(connection, lambda: SECRET, dataclasses.asdict(report), time.monotonic() + 10)
            self.channels.append(SecureChannel(Peer(connection), key, is_leader=False))

    def beat(self, **changes: Any) -> list[dict[str, Any]]:
        """Let all nodes report; return the orders to the first."""
        orders = []
        for channel, report in zip(self.channels, self.reports, strict=True):
            channel.send(dataclasses.asdict(dataclasses.replace(report, **changes)))
            orders.append(channel.receive())
        return orders[0]

    def close(self) -> None:
        if self.thread.is_alive():
            self.beat(state=State.LEFT, code=85, text="Stopped.")
            self.thread.join(10)
        assert not self.thread.is_alive()
        for channel in self.channels:
            channel.close()
        self.listener.close()


@pytest.fixture
def lead(tmp_path, monkeypatch) -> Iterator[Callable[..., Led]]:
    monkeypatch.setattr(leader, "_END_SECONDS", 0.2)
    monkeypatch.setattr(leader, "SILENT", 60.0)  # on a slow machine, many nodes take longer to join
    with contextlib.ExitStack() as stack:

        def make(name: str, nodes: int = 1) -> Led:
            led = Led(tmp_path / "aegis", name, nodes)
            led.join()
            stack.callback(led.close)
            return led

        yield make


def test_the_leader_decides_at_most_twenty_times_a_second_however_many_nodes_send(lead, monkeypatch):
    decided = [0]
    decide = Roster.decide

    def count(roster: Roster, now: float) -> None:
        decided[0] += 1
        decide(roster, now)

    monkeypatch.setattr(Roster, "decide", count)
    led, orders = lead("job", 48), list[dict[str, Any]]()
    began, before = time.monotonic(), decided[0]
    while (seconds := time.monotonic() - began) < 2.0:
        orders += led.beat()
        time.sleep(BEAT / 10)
    assert 5 < decided[0] - before <= seconds / 0.05 + 2
    assert orders[-1]["runs"]


@pytest.fixture
def take(tmp_path, monkeypatch) -> Callable[[str], None]:
    """Take the fencing token of the run as a process of a job."""

    def make(job: str) -> None:
        monkeypatch.setitem(fencing._TAKER, "job", job)
        (tmp_path / CHECKPOINTS).mkdir(exist_ok=True)
        fencing.Fence(tmp_path / CHECKPOINTS).take({})

    return make


def end_code(led: Led, **changes: Any) -> int | None:
    """The exit code of a job; None if it goes on for two seconds, in which its leader looks at the token."""
    began, orders = time.monotonic(), list[dict[str, Any]]()
    while time.monotonic() < began + 2 and not (orders and orders[-1]["code"]):
        orders += led.beat(**changes)
        time.sleep(0.1)
    return orders[-1]["code"]


def test_a_job_ends_once_another_has_taken_a_token_after_its_own_on_the_same_host(lead, take):
    led = lead("own")
    for name, code in (("other", None), ("own", None), ("other", SupervisorExit.SUPERSEDED)):
        take(name)
        assert end_code(led) == code


def test_a_leader_that_was_restarted_learns_that_its_job_has_had_a_token(lead, take):
    take("other")
    led = lead("own")
    assert end_code(led) is None
    assert end_code(led, has_token=True) == SupervisorExit.SUPERSEDED


def test_a_leader_that_was_frozen_writes_nothing_after_another_job_has_taken_a_token(lead, take, tmp_path, monkeypatch):
    path, frozen, thawed = tmp_path / "aegis" / EVENTS, threading.Event(), threading.Event()
    take("own")
    led = lead("own")
    receive = led.leader._receive_until

    def freeze(deadline: float) -> float:
        frozen.set()
        assert thawed.wait(60)
        return receive(deadline)

    assert end_code(led) is None
    monkeypatch.setattr(led.leader, "_receive_until", freeze)
    assert frozen.wait(10)
    assert led.leader._files.finish(10)
    take("other")
    with path.open("ab") as file:
        file.write(b"Another job's event.\n")
    before = path.read_bytes()
    led.channels[0].close()
    thawed.set()
    led.thread.join(10)
    assert path.read_bytes() == before


def names(folder: Path) -> list[str]:
    """Who has written the log: the name of a leader, or `Ranks 0: NAME` once it has started an attempt."""
    return [event["text"].split("-")[0] for event in read_events(folder / "aegis" / EVENTS)]


def wait_for(folder: Path, name: str, led: Led) -> None:
    deadline = time.monotonic() + 20
    while names(folder)[-1:] != [f"Ranks 0: {name}"]:
        assert time.monotonic() < deadline
        led.beat()
        time.sleep(0.1)


def test_a_leader_that_ends_while_it_waits_for_the_log_cuts_nothing(lead, tmp_path):
    path = tmp_path / "aegis" / EVENTS
    first = lead("first")
    wait_for(tmp_path, "first", first)
    second = lead("second")
    orders = second.beat()
    while not (orders and orders[-1]["runs"]):
        orders = second.beat()
    second.close()
    first.close()
    written = path.read_bytes()
    assert names(tmp_path)[:2] == ["first", "Ranks 0: first"]
    deadline = time.monotonic() + 20
    while "Ranks 0: second" not in names(tmp_path):  # its thread still runs, unlike that of a process which has ended
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert path.read_bytes().startswith(written)
    assert b"\0" not in path.read_bytes()
    second.leader._log_lock.close()


def test_two_leaders_of_a_run_never_write_its_log_at_once_and_lose_no_event(lead, tmp_path):
    first = lead("first")
    wait_for(tmp_path, "first", first)
    second = lead("second")
    for _ in range(15):  # a second and a half, in which the first writes its state
        first.beat()
        second.beat()
        time.sleep(0.1)
    assert set(names(tmp_path)) == {"first", "Ranks 0: first"}
    first.close()
    wait_for(tmp_path, "second", second)
    events = read_events(tmp_path / "aegis" / EVENTS)
    assert [event["code"] for event in events] == [
        "node-joined",
        "job-attempt",
        "job-end",
        "node-joined",
        "job-attempt",
    ]
    assert len({event["id"] for event in events}) == len(events)
