"""Partitions of a job at random moments: whoever can reach whom, never two processes write to the run's storage.

The nodes are network namespaces; what the scheduler does is what a real one may do at worst: it starts the job again on
the nodes that were cut off, while the leader's side still runs.
"""

import random
import signal
import time
from collections.abc import Callable

import pytest

from tests.aegis.cluster_helpers import Cluster, Node, can_make_networks, make_nodes
from tests.aegis.storage_log import StorageLog
from tests.train_helpers import ROOT
from zaya_jax.run.checkpoints import CHECKPOINTS

pytestmark = [pytest.mark.soak, pytest.mark.skipif(not can_make_networks(), reason="needs root for namespaces")]

ROUNDS = 3  # partitions of a test
AT_ONCE = 0.1  # seconds in which a write that had begun before another process took its token may end


class Partitioned:
    """A job of two nodes and two spares, whose process 0 writes a row every 10 ms."""

    def __init__(self, cluster: Cluster, log: StorageLog) -> None:
        self.cluster, self.nodes, self.log = cluster, cluster.nodes, log

    def start(self, job: list[Node]) -> None:
        """Start a job on these nodes, and wait until its process 0 has taken a token and written a row."""
        before = len(self.log.takers())
        for node in job:
            self.cluster.start(node, job)
        self.until(lambda: len(self.log.takers()) > before)
        taker = self.log.takers()[-1]
        self.until(lambda: any(write.pid == taker and write.name == "metrics.jsonl" for write in self.log.writes))

    def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not is_so():
            assert time.monotonic() < deadline, "\n---\n".join(map(self.cluster.said, self.nodes))
            time.sleep(0.02)

    def part(self, draw: random.Random) -> dict[str, object]:
        """One partition, from the start of the job to its end; return what was drawn and measured."""
        self.start(self.nodes)
        time.sleep(draw.uniform(0, 2))
        far = draw.sample(self.nodes[1:], draw.choice((1, 2, 2, 3)))
        far.sort(key=lambda node: node.index)
        near = [node for node in self.nodes if node not in far]
        sends, receives = draw.choice(((False, False), (False, False), (True, False), (False, True)))
        began = time.monotonic()
        wires = far[0].wires
        wires.cut([node.index for node in far], [node.index for node in near], sends=sends, receives=receives)
        assert self.cluster.wait(far) == [75] * len(far)
        stopped = time.monotonic() - began
        assert stopped < 10
        assert not [pid for node in far for pid in node.pids]
        if len(far) > 1:
            self.start(far)
            assert self.cluster.wait(near) == [96] * len(near)
            assert not [pid for node in near for pid in node.pids]
        wires.mend()
        (far if len(far) > 1 else near)[0].process.send_signal(signal.SIGTERM)
        assert set(self.cluster.wait(far if len(far) > 1 else near)) == {85}
        cut = {"far": [node.index for node in far], "sends": sends, "receives": receives}
        return {**cut, "far side stopped": round(stopped, 2)}


@pytest.mark.parametrize("seed", range(5))
def test_after_a_partition_never_two_processes_write(tmp_path, seed):
    draw, checkpoints = random.Random(seed), tmp_path / "run" / CHECKPOINTS
    checkpoints.mkdir(parents=True)
    with make_nodes(4) as nodes, StorageLog([checkpoints.parent, checkpoints]) as log:
        cluster = Cluster(tmp_path, nodes, 2, 0)
        cluster.trainer = [str(ROOT / "tests/aegis/fenced_trainer.py"), str(cluster.run_dir)]
        job = Partitioned(cluster, log)
        for _ in range(ROUNDS):
            print(job.part(draw), flush=True)
        assert log.late_writes(AT_ONCE) == []
        print({"processes that took a token": len(log.takers()), "writes": len(log.writes)}, flush=True)
        assert len(log.takers()) >= ROUNDS


def test_the_leaders_node_is_cut_off_while_its_supervisor_is_frozen(tmp_path):
    """Its leader and its process 0 still run, and nobody there can stop them."""
    checkpoints = tmp_path / "run" / CHECKPOINTS
    checkpoints.mkdir(parents=True)
    with make_nodes(4) as nodes, StorageLog([checkpoints.parent, checkpoints]) as log:
        cluster = Cluster(tmp_path, nodes, 2, 0)
        cluster.trainer = [str(ROOT / "tests/aegis/fenced_trainer.py"), str(cluster.run_dir)]
        job, (old, *others) = Partitioned(cluster, log), nodes
        job.start(nodes)
        assert old.process is not None
        old.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        old.cut(others, sends=False, receives=False)
        assert cluster.wait(others, 30) == [75] * 3
        stopped = time.monotonic() - began
        print({"all others stopped": round(stopped, 2)}, flush=True)
        assert stopped < 10
        assert all(cluster.said(node).count("Exit code 75.") == 1 for node in others)
        job.start(others)
        time.sleep(15)  # so the old process 0, which nobody stops, looks at its token
        assert log.late_writes(AT_ONCE) == []
        old.process.send_signal(signal.SIGCONT)
        code = cluster.wait([old], 60)
        print({"the frozen supervisor ended with": code}, flush=True)
        assert code[0] in (75, 96)
        assert old.pids == []
        assert log.late_writes(AT_ONCE) == []
        old.wires.mend()
        others[0].process.send_signal(signal.SIGTERM)
        assert cluster.wait(others) == [85] * 3
