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
        self.leader = Leader([self.listener], SECRET, Setup(str(folder), self.job, 60.0, 0, name))
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


def test_a_job_ends_once_another_has_taken_a_newer_token_on_the_same_host(lead, tmp_path, monkeypatch):
    (tmp_path / CHECKPOINTS).mkdir()
    led, orders = lead("own"), list[dict[str, Any]]()
    for name, code in (("own", None), ("other", SupervisorExit.SUPERSEDED)):
        monkeypatch.setitem(fencing._TAKER, "job", name)
        fencing.Fence(tmp_path / CHECKPOINTS).take({})
        began = time.monotonic()
        while time.monotonic() < began + 3 and not (orders and orders[-1]["code"]):
            orders += led.beat()
            time.sleep(0.1)
        assert orders[-1]["code"] == code


def test_two_leaders_of_a_run_never_write_its_log_at_once_and_lose_no_event(lead, tmp_path):
    def names() -> list[str]:
        return [event["text"].split("-")[0] for event in read_events(tmp_path / "aegis" / EVENTS)]

    def wait_for(name: str, led: Led) -> None:
        deadline = time.monotonic() + 20
        while names()[-1:] != [f"Ranks 0: {name}"]:
            assert time.monotonic() < deadline
            led.beat()
            time.sleep(0.1)

    first = lead("first")
    wait_for("first", first)
    second = lead("second")
    for _ in range(15):  # a second and a half, in which the first writes its state
        first.beat()
        second.beat()
        time.sleep(0.1)
    assert set(names()) == {"first", "Ranks 0: first"}
    first.close()
    wait_for("second", second)
    events = read_events(tmp_path / "aegis" / EVENTS)
    assert [event["code"] for event in events] == [
        "node-joined",
        "job-attempt",
        "job-end",
        "node-joined",
        "job-attempt",
    ]
    assert len({event["id"] for event in events}) == len(events)
