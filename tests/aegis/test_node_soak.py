"""Faults of all kinds, one after the other, in a job of three nodes and a spare; and slow, lossy links without any.

`NODE_FAULTS` in the environment is the number of faults (40), `CLEAN_MINUTES` how long nothing may happen (10).
"""

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.aegis.cluster_helpers import OWN, POLICY, Cluster, Node, can_make_networks, make_nodes
from tests.aegis.test_node_faults import find
from tests.aegis.wires import ip
from zaya_jax.aegis.job_view import read_job

pytestmark = [pytest.mark.soak, pytest.mark.skipif(not can_make_networks(), reason="needs root for namespaces")]

FAULTS, CLEAN = int(os.environ.get("NODE_FAULTS", "40")), 60 * float(os.environ.get("CLEAN_MINUTES", "10"))
EVERY, BATCH = 25, 192  # steps between two faults, tokens of a step
HANG = 15.0  # seconds


@contextlib.contextmanager
def job(folder: Path, steps: int, hang: float = HANG) -> Iterator[Cluster]:
    overrides = [f"train.batch.tokens={BATCH}", f"phases.0.tokens={steps * BATCH}", "evaluation.every=50"]
    timeouts = dict.fromkeys(("data", "dispatch", "device_wait", "floor"), hang)
    with make_nodes(4) as nodes:
        cluster = Cluster(folder, nodes, 3, steps, *overrides)
        policy = {**POLICY, "timeouts": timeouts}
        (folder / "policy.yaml").write_text(json.dumps(policy), encoding="utf-8")
        cluster.start_all()
        yield cluster


class Chaos:
    """Makes faults, one at a time, and waits until the job has recovered with all its nodes."""

    def __init__(self, cluster: Cluster, draw: random.Random) -> None:
        self.cluster, self.draw = cluster, draw
        self.kinds: dict[str, Callable[[], tuple[str, str]]] = {
            "process killed": lambda: self._signal_trainer(signal.SIGKILL, "exit--9"),
            "process stopped": lambda: self._signal_trainer(signal.SIGSTOP, "hang"),
            "node killed": self._kill_node,
            "node frozen": self._freeze_node,
            "node cut off": lambda: self._cut_node(False, False),
            "node cut off, sends": lambda: self._cut_node(True, False),
            "node cut off, receives": lambda: self._cut_node(False, True),
            "link down": self._link_down,
            "leader killed": lambda: self._signal_leader(signal.SIGKILL),
            "leader stopped": lambda: self._signal_leader(signal.SIGSTOP),
            "leader's node killed": self._kill_leaders_node,
        }

    def make(self, kind: str) -> dict[str, Any]:
        """Make a fault; return how it was noticed, and when."""
        began = time.time()
        code, name = self.kinds[kind]()
        self._until(lambda: len(read_job(self.cluster.run_dir).get("nodes", ())) == 4)
        step = self.cluster.step
        self._until(lambda: self.cluster.step > step + 2 or self.cluster.step == self.cluster.steps)
        events = [event for event in self.cluster.events if event["unix"] >= began - 0.01]
        stops = [event for event in events if event["code"] in ("job-stop", "job-end") and event["node"] == "leader"]
        found = [event for event in events if event["code"] == code
                 and (name in event["text"] if event["node"] == "leader" else name in event["node"])]  # fmt: skip
        seconds = round(found[0]["unix"] - began, 2) if found else None
        return {"fault": kind, "node": name, "noticed as": code if found else None, "seconds": seconds,
                "restarts": len(stops)}  # fmt: skip

    def _until(self, is_so: Callable[[], bool], seconds: float = 150) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            assert time.monotonic() < deadline, "\n---\n".join(map(self.cluster.said, self.cluster.nodes))
            time.sleep(0.1)

    def _ranked(self) -> list[Node]:
        """The nodes but the first that have a rank."""
        nodes = read_job(self.cluster.run_dir)["nodes"]
        return [self.cluster.nodes[node["node"]] for node in nodes if node["rank"]]

    def _name(self, node: Node) -> str:
        return f"zaya{node.index}-{node.index}"

    def _signal_trainer(self, number: int, code: str) -> tuple[str, str]:
        node = self.draw.choice([self.cluster.nodes[0], *self._ranked()])
        find(node, "zaya_jax.main").send_signal(number)
        self._until(lambda: self._has_stopped(node))
        return code, self._name(node)

    def _has_stopped(self, node: Node) -> bool:
        return not any("zaya_jax.main" in psutil.Process(pid).cmdline()[:3] for pid in node.pids)

    def _restart(self, node: Node) -> None:
        """What the scheduler does with a node whose supervisor has ended."""
        assert node.process is not None
        node.process.wait(60)
        self.cluster.start(node)

    def _kill_node(self) -> tuple[str, str]:
        node = self.draw.choice(self._ranked())
        node.send(signal.SIGKILL)
        self._restart(node)
        return "node-lost", self._name(node)

    def _freeze_node(self) -> tuple[str, str]:
        node = self.draw.choice(self._ranked())
        node.send(signal.SIGSTOP)
        time.sleep(self.draw.uniform(5, 9))
        node.send(signal.SIGCONT)
        return "node-lost", self._name(node)

    def _cut_node(self, sends: bool, receives: bool) -> tuple[str, str]:
        node = self.draw.choice(self._ranked())
        others = [each for each in self.cluster.nodes if each is not node]
        node.cut(others, sends=sends, receives=receives)
        assert node.process is not None
        assert node.process.wait(15) == 75
        node.wires.mend()
        self._restart(node)
        return "node-lost", self._name(node)

    def _link_down(self) -> tuple[str, str]:
        node = self.draw.choice(self._ranked())
        ip("-n", node.name, "link", "set", "eth0", "down")
        assert node.process is not None
        assert node.process.wait(15) == 75
        ip("-n", node.name, "link", "set", "eth0", "up")
        self._restart(node)
        return "node-lost", self._name(node)

    def _signal_leader(self, number: int) -> tuple[str, str]:
        joined = sum(event["code"] == "node-joined" for event in self.cluster.leader_events)
        find(self.cluster.nodes[0], "zaya_jax.aegis.leader").send_signal(number)
        self._until(lambda: sum(e["code"] == "node-joined" for e in self.cluster.leader_events) >= joined + 4)
        return "node-joined", "zaya"

    def _kill_leaders_node(self) -> tuple[str, str]:
        first, *others = self.cluster.nodes
        first.send(signal.SIGKILL)
        assert self.cluster.wait(others) == [75] * 3
        self.cluster.start_all()
        return "exit-retry_elsewhere", "zaya"


def test_after_any_faults_the_results_are_those_of_the_undisturbed_run_and_nothing_is_left(tmp_path):
    steps, files = EVERY * (FAULTS + 2), psutil.Process().num_fds()
    with job(tmp_path / "undisturbed", steps) as cluster:
        assert cluster.wait(cluster.nodes, 1800) == [0] * 4
        expected = cluster.results()
    draw, rows = random.Random(FAULTS), list[dict[str, Any]]()
    with job(tmp_path / "disturbed", steps) as cluster:
        chaos = Chaos(cluster, draw)
        kinds = (list(chaos.kinds) * FAULTS)[:FAULTS]
        for number, kind in enumerate(draw.sample(kinds, FAULTS)):
            cluster.wait_for_step(EVERY * (number + 1))
            rows.append(chaos.make(kind))
            print(json.dumps(rows[-1]), flush=True)
        assert cluster.wait(cluster.nodes, 600) == [0] * 4
        assert cluster.results() == expected
        assert [pid for node in cluster.nodes for pid in node.pids] == []
        left = {path.name for path in cluster.run_dir.rglob("*") if "partial" in path.name or "secret" in path.name}
        assert left == set()
        alarms = sum(event["code"] == "job-stop" for event in cluster.leader_events)
    attributed = [row for row in rows if row["noticed as"]]
    print(json.dumps({"faults": Counter(row["fault"] for row in rows), "attributed": len(attributed),
                      "attempts stopped": alarms}), flush=True)  # fmt: skip
    assert len(attributed) >= 0.95 * FAULTS
    assert alarms <= sum(row["restarts"] for row in rows)
    assert OWN not in ip("netns", "list")
    assert psutil.Process().num_fds() == files


def test_slow_and_lossy_links_raise_no_alarm(tmp_path):
    """200 ms in each direction, and 1 % of the frames lost: training is slow, and nothing else happens."""
    with job(tmp_path, 100_000, 1800.0) as cluster:  # the default: a step waits for hundreds of messages
        cluster.wait_for_step(1)
        wires = cluster.nodes[0].wires
        wires.delay, wires.loss = 0.2, 0.01
        first, deadline = cluster.step, time.monotonic() + CLEAN
        while time.monotonic() < deadline:
            assert [node.process.poll() for node in cluster.nodes if node.process] == [None] * 4
            time.sleep(1)
        print(json.dumps({"minutes": CLEAN / 60, "steps": cluster.step - first, "frames": wires.frames,
                          "lost": wires.dropped}), flush=True)  # fmt: skip
        alarms = [event["text"] for event in cluster.events if event["severity"] in ("warning", "error", "fatal")]
        assert alarms == []
        assert len([event for event in cluster.leader_events if event["code"] == "job-attempt"]) == 1
