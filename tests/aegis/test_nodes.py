"""Supervisors of several nodes on this machine, with a light trainer: spares, the leader's process, and strangers."""

import contextlib
import itertools
import json
import os
import re
import secrets
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psutil
import pytest

from tests.aegis.aegis_helpers import LIGHT, QUICK, Supervised, check_events, left_running
from tests.job.processes_helpers import free_port
from tests.train_helpers import ROOT
from zaya_jax.aegis import member
from zaya_jax.aegis.__main__ import main
from zaya_jax.aegis.events import EVENTS, read_events
from zaya_jax.aegis.exit_codes import SupervisorExit
from zaya_jax.aegis.job_view import format_events, format_job, merge_events
from zaya_jax.aegis.member import Member, Place
from zaya_jax.aegis.roster import Order
from zaya_jax.aegis.state import write_state
from zaya_jax.aegis.supervision_report import describe_nodes
from zaya_jax.run.handshake import Strangers
from zaya_jax.run.job_secret import VARIABLE, prove
from zaya_jax.run.peer import Peer


class Nodes:
    """The supervisors of a job; each has the number of its node."""

    def __init__(
        self, folder: Path, needed: int, spares: int, steps: int, *faults: str, policy: dict | None = None
    ) -> None:
        self.folder, self.run_dir, self.port = folder, folder / "run", free_port()
        self._job = [*map(str, ("--nodes", needed, "--coordinator", f"127.0.0.1:{self.port}"))]
        self._command = [sys.executable, str(LIGHT), str(folder), str(steps), *faults]
        self._policy = policy
        self.nodes = [self.start(index, spares) for index in range(needed + spares)]

    def start(self, index: int, spares: int) -> Supervised:
        flags = [*self._job, "--spares", str(spares), "--node", str(index)]
        environment = {"JAX_PLATFORMS": "cpu", "TOGETHER": "1"}
        return Supervised(self.folder, self._command, 1, self._policy, environment, flags)

    def until(self, is_so: Callable[[], object], seconds: float = 60) -> float:
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, f"{self.nodes[0].said}\n{format_events(self.run_dir)}"
            time.sleep(0.02)
        return time.time()

    @property
    def events(self) -> list[dict]:
        """Of the leader."""
        return read_events(self.run_dir / "aegis" / EVENTS)

    def count(self, code: str) -> int:
        return sum(event["code"] == code for event in self.events)

    def leader(self) -> psutil.Process:
        children = psutil.Process(self.nodes[0].process.pid).children()
        (leader,) = [child for child in children if "zaya_jax.aegis.leader" in child.cmdline()]
        return leader

    def trainers(self) -> set[int]:
        return {process.pid for process in left_running(self.folder) if "aegis" not in process.cmdline()[2]}

    def step(self, rank: int) -> int:
        path = self.folder / f"checkpoint-{rank}"
        return int(path.read_text()) if path.exists() else 0

    def close(self) -> None:
        for node in self.nodes:
            node.process.kill()
            node.process.wait()


@pytest.fixture
def start(tmp_path) -> Iterator[Callable[..., Nodes]]:
    made: list[Nodes] = []

    def make(needed: int, spares: int, steps: int, *faults: str, **options: dict) -> Nodes:
        made.append(Nodes(tmp_path, needed, spares, steps, *faults, **options))
        return made[-1]

    yield make
    for nodes in made:
        nodes.close()


GARBAGE = [b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000, b'{"index": 1} 00\n', b"9" * 2**17]


@contextlib.contextmanager
def annoyed(port: int, secret: str) -> Iterator[None]:
    """Strangers of the leader: garbage, endless lines, a true hello said again, and 200 that say a byte at a time."""
    body = json.dumps({"index": 1, "nonce": secrets.token_hex(16)})
    recorded = f"{body} {prove(secret, 'enter', secrets.token_hex(16), body)}\n".encode()  # to another challenge
    said, ended = [*GARBAGE, recorded], threading.Event()

    def annoy() -> None:
        held = list[socket.socket]()
        for number in itertools.count():
            with contextlib.suppress(OSError):  # no longer there, or dropped
                held.append(socket.create_connection(("127.0.0.1", port), timeout=5))
                held[-1].sendall(said[number % 20] if number % 20 < len(said) else b"{")
            for connection in held[-200:]:
                with contextlib.suppress(OSError):
                    connection.send(b"{")
            if ended.wait(0.02):
                break
            for connection in held[:-200]:
                connection.close()
                held.remove(connection)
        for connection in held:
            connection.close()

    thread = threading.Thread(target=annoy)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def test_a_spare_replaces_a_lost_node_and_strangers_and_a_lost_leader_disturb_nothing(start, tmp_path):
    nodes = start(2, 1, 400)
    foreign = nodes.start(3, 5)
    nodes.until(lambda: nodes.step(0) and nodes.step(1))
    leader = nodes.leader()
    (secret,) = nodes.run_dir.glob("job_secret*")
    with annoyed(nodes.port + 1, secret.read_text().strip()):
        check_the_faults(nodes, leader, foreign)
    check_the_log(nodes.run_dir)
    assert not left_running(tmp_path)
    assert not list(nodes.run_dir.glob("job_secret*"))


def check_the_faults(nodes: Nodes, leader: psutil.Process, foreign: Supervised) -> None:
    time.sleep(2)  # under fire
    assert leader.memory_info().rss < 100e6
    assert leader.num_fds() < 64 + 40
    trainers = nodes.trainers()
    leader.kill()
    nodes.until(lambda: nodes.count("node-joined") >= 6)  # all are back at another leader
    assert nodes.trainers() == trainers
    assert nodes.count("job-attempt") == 1
    began = time.time()
    nodes.nodes[1].process.kill()
    assert nodes.until(lambda: nodes.count("node-lost")) - began < 2
    assert [node.wait(60) for node in nodes.nodes] == [0, -signal.SIGKILL, 0]
    assert foreign.wait(30) == 78
    assert "spares=5 instead of 1" in nodes.nodes[0].said
    assert (nodes.step(0), nodes.step(1)) == (400, 400)
    assert json.loads((nodes.run_dir / "aegis" / "state.json").read_text())["strangers"] > 20


def check_the_log(run_dir: Path) -> None:
    """The log of all nodes tells what followed from what; the state names ranks."""
    host, events = os.uname().nodename, merge_events(run_dir)
    lost = next(event for event in events if event["code"] == "node-lost")
    assert (lost["node"], lost["text"]) == ("leader", f"{host}-1 was lost: its connection closed.")
    stop = next(event for event in events if event["code"] == "job-stop" and event["node"] == "leader")
    follow = [event for event in events if event.get("cause") == stop["id"] and event.get("cause_node") == "leader"]
    follow = [(event["node"], event["kind"], event["code"], event["fault"]) for event in follow]
    assert follow == [(f"{host}-0", "detect", "job-stop", "peers")]
    assert not [event for event in events if event["code"] == "hang"]
    second = next(event for event in events if event["code"] == "job-attempt" and event["attempt"] == 2)
    assert second["text"] == f"Ranks 0: {host}-0, 1: {host}-2"
    assert second["cause"] == stop["id"]
    starts = [event for event in events if event["code"] == "attempt" and event["attempt"] == 2]
    assert {(event["node"], event["cause"]) for event in starts} == {
        (f"{host}-0", second["id"]),
        (f"{host}-2", second["id"]),
    }
    places = {(event["node"], event["id"]): place for place, event in enumerate(events)}
    for event in events:
        if event["cause"] is not None:
            assert places[event.get("cause_node", event["node"]), event["cause"]] < places[event["node"], event["id"]]
    for node in ("", f"{host}-0", f"{host}-2"):
        for event in read_events(run_dir / "aegis" / node / EVENTS):
            assert "cause_node" in event or event["cause"] is None or event["cause"] < event["id"]
    assert "Job of 2 nodes: ended; attempt 2." in format_job(run_dir)
    assert f"rank 1   {host}-2" in format_job(run_dir)
    assert f"lost     {host}-1 was lost" in format_job(run_dir)
    assert f"(after leader:{stop['id']})" in format_events(run_dir)
    listed = subprocess.run([sys.executable, "-m", "zaya_jax.aegis", "events", str(run_dir), "--json"], cwd=ROOT,
                            check=True, capture_output=True).stdout  # fmt: skip
    assert json.loads(listed) == events


def test_a_hang_names_its_node_and_keeps_the_stacks_of_all_and_a_spare_replaces_a_repeated_suspect(start):
    """The others wait for process 1, and are over their time, too."""
    nodes = start(3, 1, 80, "wait@20:1", "SIGSTOP@50:1", policy={"timeouts": QUICK})
    assert [node.wait(60) for node in nodes.nodes] == [0, 75, 0, 0]
    host = os.uname().nodename
    hangs = [event for event in nodes.events if event["code"] == "hang"]
    assert [event["rank"] for event in hangs] == [1, 1]
    assert f"more than its timeout of 2 s. The cause seems to be process 1 on {host}-1." in hangs[0]["text"]
    assert f"process 1 (stopped by a signal) on {host}-1." in hangs[1]["text"]
    assert all(2.0 < event["seconds"]["detect"] < 4.0 for event in hangs)
    assert [fault["fault"] for fault in describe_nodes(nodes.run_dir)[f"{host}-1"]["faults"]] == ["hang", "hang"]
    for index in range(3):
        stacks = next((nodes.run_dir / "aegis").glob(f"*-{index}/evidence/attempt-1/process-0.stderr")).read_text()
        assert ("in happen" if index == 1 else "in wait_for_others") in stacks
    assert f"{host}-1 was replaced: it seemed to cause 2 hangs." in nodes.nodes[1].said
    assert [event["text"].split(", ")[1] for event in nodes.events if event["code"] == "job-attempt"] == [
        f"1: {host}-1", f"1: {host}-1", f"1: {host}-3"]  # fmt: skip
    check_events(nodes.events)


def test_all_stop_within_10_s_and_ask_for_other_nodes_if_the_leaders_node_is_lost(start, tmp_path):
    nodes = start(2, 0, 100_000)
    nodes.until(lambda: nodes.step(0) and nodes.step(1))
    began = time.monotonic()
    nodes.nodes[0].process.kill()
    assert nodes.nodes[1].wait(30) == 75
    assert time.monotonic() - began < 10
    assert not left_running(tmp_path)
    # The kernel kills the leader, too, but it may have noticed the loss of its node before.
    assert re.search(r"Node 0, with the leader of the job at 127\.0\.0\.1|It is the leader's node", nodes.nodes[1].said)
    check_events(read_events(nodes.run_dir / "aegis" / f"{os.uname().nodename}-1" / EVENTS)[:1])


@pytest.mark.parametrize("is_leader_lost", [False, True])
def test_a_request_to_stop_one_node_lets_all_save(start, tmp_path, is_leader_lost):
    nodes = start(2, 1, 100_000)
    nodes.until(lambda: nodes.step(0) and nodes.step(1))
    if is_leader_lost:
        nodes.leader().kill()
    nodes.nodes[1].process.send_signal(signal.SIGTERM)
    assert [node.wait(30) for node in nodes.nodes] == [85] * 3
    saved = [
        int(line.split("step ")[1].split(",")[0]) for line in nodes.nodes[0].said.splitlines() if "is saved" in line
    ]
    assert sorted(saved) == sorted((nodes.step(0), nodes.step(1)))
    assert not left_running(tmp_path)


def test_a_request_to_stop_a_node_that_waits_for_its_address_lets_the_scheduler_requeue(tmp_path):
    flags = ["--nodes", "2", "--node", "0", "--coordinator", "192.0.2.1:8476"]  # of no host
    node = Supervised(tmp_path, [sys.executable, "-c", ""], flags=flags)
    deadline = time.monotonic() + 30
    while "cannot listen" not in node.said:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    node.process.send_signal(signal.SIGTERM)
    assert node.wait(10) == SupervisorExit.PREEMPTED
    assert node.said.endswith("Stopped by SIGTERM before the job started.\n")


def test_a_member_whose_thread_fails_ends_its_supervisor(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv(VARIABLE, "secret")
    node = Member(Place(1, "node-1", "x" * 70, 1, tmp_path / "secret", {}, 60.0), 0, None)  # no name of a host
    assert node.wait_for_start(lambda: not time.sleep(0.01)) is None
    code, text = node.ended or (0, "")
    assert (code, "UnicodeError" in text) == (SupervisorExit.SOFTWARE, True)
    node.leave(SupervisorExit.SOFTWARE, text)
    assert "UnicodeError" in capfd.readouterr().err


def test_a_node_gives_up_a_silent_leader_also_while_its_thread_waits_for_a_file_system(tmp_path, monkeypatch):
    answers = threading.Event()

    def wait(_):
        answers.wait()
        raise OSError("late")

    monkeypatch.setattr(member, "_GIVE_UP", 0.3)
    monkeypatch.setattr(Member, "_connect", wait)
    node = Member(Place(1, "node-1", "127.0.0.1", 1, tmp_path / "secret", {}, 60.0), 0, None)
    node._follow(Order(has_token=True))
    node.note(unfit="Its check failed when it was given a rank.")
    node._follow(Order(1, rank=0, runs=True))
    assert node.wait_for_start(lambda: True) is not None
    assert (node._describe()["has_token"], node._describe()["unfit"]) == (True, "")
    deadline = time.monotonic() + 20
    try:
        assert node.wait_for_start(lambda: not time.sleep(0.01) and time.monotonic() < deadline) is None
        code, text = node.ended or (0, "")
        assert (code, "has sent nothing" in text) == (SupervisorExit.RETRY_ELSEWHERE, True)
    finally:
        answers.set()
        node.leave(SupervisorExit.RETRY_ELSEWHERE, "")


def test_a_leader_that_freezes_before_its_first_order_is_started_again(tmp_path, monkeypatch):
    """As one that is stopped right after it has admitted node 0, which waited for it until the job was given up."""
    monkeypatch.setenv(VARIABLE, "secret")
    monkeypatch.setattr(member, "SILENT", 0.2)
    revived = list[bool]()

    class Recorder:
        pids: tuple[int, ...] = ()

        def revive(self, *, was_lost: bool) -> None:
            revived.append(was_lost)

        def end(self, seconds: float) -> None:
            del seconds

    with socket.create_server(("127.0.0.1", 0)) as listener, selectors.DefaultSelector() as selector:
        admitted = list[Peer]()
        strangers = Strangers(selector, "secret", lambda peer, *_: admitted.append(peer))
        selector.register(listener, selectors.EVENT_READ, strangers.accept)
        place = Place(0, "node-0", *listener.getsockname(), tmp_path / "secret", {}, 60.0)
        node = Member(place, 0, cast("Any", Recorder()))
        deadline = time.monotonic() + 20
        while not revived:
            assert time.monotonic() < deadline
            for key, _ in selector.select(0.05):
                key.data(key.fileobj)
            assert node.ended is None  # whoever asks counts the silence
        node._ended = SupervisorExit.RETRY_ELSEWHERE, "the end of the test"
        node.leave(SupervisorExit.RETRY_ELSEWHERE, "")
        strangers.drop_late(0)
        for peer in admitted:
            peer.close()
    assert revived[0]


def test_the_status_of_a_job_names_the_checkpoint_that_a_spare_has(tmp_path):
    nodes = [{"node": 0, "name": "a", "state": "running", "rank": 0, "held": None},
             {"node": 1, "name": "b", "state": "ready", "rank": None, "held": 40}]  # fmt: skip
    (tmp_path / "aegis").mkdir()
    write_state(tmp_path / "aegis", state="running", attempt=2, nodes=nodes, lost={}, why="", needed=1, strangers=0)
    lines = format_job(tmp_path).splitlines()
    assert lines[1:] == ["  rank 0   a: running", "  spare    b: ready, has the checkpoint of step 40"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nodes", "2", "--node", "0", "--coordinator", "localhost:65535"], "must be less than 65535"),
        (["--spares", "1"], "--spares is 1, but must be 0 unless --nodes is at least 2"),
        (["--nodes", "2", "--min-nodes", "3"], "--min-nodes is 3, but must be from 1 to --nodes 2"),
        (["--nodes", "2", "--spares", "-1"], "--spares is -1"),
        (["--nodes", "2", "--spares", "1", "--node", "3", "--coordinator", "localhost:1"], "--node from 0 to 2"),
    ],
)
def test_flags_that_cannot_work_are_refused(tmp_path, capsys, flags, message):
    assert main(["run", "--run-dir", str(tmp_path), *flags, "--", "true"]) == SupervisorExit.CONFIGURATION
    assert message in capsys.readouterr().err
