"""Faults of whole nodes at every moment of a run, two at once, of a spare, and of the storage that all nodes share."""

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.aegis.cluster_helpers import Cluster, Node, can_make_networks, make_nodes
from tests.aegis.test_node_faults import OVERRIDES, STEPS, expected, find, measure, ranks, trained, wait_for_attempt
from zaya_jax.aegis.job_view import format_job
from zaya_jax.run.progress_record import VARIABLE, Phase, read_progress

assert expected  # a fixture
pytestmark = [pytest.mark.soak, pytest.mark.skipif(not can_make_networks(), reason="needs root for namespaces")]


def wait_for_phase(cluster: Cluster, node: Node, phase: Phase, after: int = -1) -> None:
    """Wait until the trainer of a node, other than the process `after`, is in a phase."""
    deadline = time.monotonic() + 200
    while True:
        for pid in node.pids:
            try:
                trainer = psutil.Process(pid)
                if pid == after or "zaya_jax.main" not in trainer.cmdline()[:3]:
                    continue
                file = os.open(trainer.environ()[VARIABLE], os.O_RDONLY)
            except (psutil.Error, OSError, KeyError):
                continue
            try:
                while (progress := read_progress(file)) is None or progress.phase is not phase:
                    assert time.monotonic() < deadline
                    if not trainer.is_running():
                        break
                    time.sleep(0.001)
                else:
                    return
            finally:
                os.close(file)
        assert time.monotonic() < deadline, "\n---\n".join(map(cluster.said, cluster.nodes))
        time.sleep(0.01)


@pytest.mark.parametrize("phase", [Phase.COMPILE, Phase.RESTORE, Phase.SAVE, Phase.EVALUATE])
def test_a_node_is_killed_in_any_phase(tmp_path, expected, phase):
    with make_nodes(4) as nodes:
        cluster = Cluster(tmp_path, nodes, 3, STEPS, *OVERRIDES)
        cluster.start_all()
        attempt, before = 2, -1
        if phase is Phase.RESTORE:
            cluster.wait_for_step(25)
            trainer = find(nodes[1], "zaya_jax.main")
            attempt, before = 3, trainer.pid
            trainer.kill()
        wait_for_phase(cluster, nodes[1], phase, before)
        began = time.time()
        nodes[1].send(signal.SIGKILL)
        assert cluster.wait(nodes) == [0, -signal.SIGKILL, 0, 0]
        measure(f"node killed in phase {phase.name.lower()}", cluster, began, attempt)
        assert ranks(cluster)[-1] == "Ranks 0: zaya0-0, 1: zaya3-3, 2: zaya2-2"
        assert cluster.results() == expected


def test_a_node_and_the_leaders_process_are_killed_at_once(tmp_path, expected):
    with trained(tmp_path) as cluster:
        began = time.time()
        find(cluster.nodes[0], "zaya_jax.aegis.leader").kill()
        cluster.nodes[1].send(signal.SIGKILL)
        assert cluster.wait(cluster.nodes) == [0, -signal.SIGKILL, 0, 0]
        measure("node and leader's process killed", cluster, began)
        assert [text.split(", ")[1] for text in ranks(cluster)] == ["1: zaya1-1", "1: zaya3-3"]
        assert cluster.results() == expected


def test_two_nodes_are_killed_at_once_and_one_returns(tmp_path, expected):
    with trained(tmp_path) as cluster:
        began = time.time()
        for node in cluster.nodes[1:3]:
            node.send(signal.SIGKILL)
        assert cluster.wait(cluster.nodes[1:3]) == [-signal.SIGKILL] * 2
        cluster.start(cluster.nodes[2])
        assert cluster.wait([cluster.nodes[index] for index in (0, 2, 3)]) == [0] * 3
        measure("two nodes killed, one returns", cluster, began)
        assert ranks(cluster)[-1] == "Ranks 0: zaya0-0, 1: zaya3-3, 2: zaya2-2"
        assert cluster.results() == expected


def test_a_bad_spare_is_named_while_it_waits_and_does_not_replace_a_node(tmp_path, expected):
    with make_nodes(4) as nodes:
        cluster = Cluster(tmp_path, nodes, 3, STEPS, *OVERRIDES)
        for node in nodes[:3]:
            cluster.start(node)
        cluster.environment = {"JAX_PLATFORMS": "absent"}
        cluster.start(nodes[3])
        cluster.environment = {}
        cluster.wait_for_step(15)
        victim = find(nodes[1], "zaya_jax.main")
        victim.suspend()  # so that the run does not finish before
        deadline = time.monotonic() + 90
        while not (found := [event for event in cluster.leader_events if event["code"] == "node-unfit"]):
            assert time.monotonic() < deadline, "\n---\n".join(map(cluster.said, nodes))
            time.sleep(0.1)
        assert "zaya3-3 cannot replace another node: The preflight of this spare failed: " in found[0]["text"]
        deadline = time.monotonic() + 5
        while "cannot replace a node: The preflight" not in format_job(cluster.run_dir):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        nodes[1].send(signal.SIGKILL)
        assert cluster.wait([nodes[1]]) == [-signal.SIGKILL]
        cluster.start(nodes[1])
        wait_for_attempt(cluster, 2, 120)
        assert cluster.wait(nodes) == [0] * 4
        assert [text.split(", ")[1] for text in ranks(cluster)] == ["1: zaya1-1"] * 2
        assert cluster.results() == expected


def test_a_shared_storage_that_is_gone_for_a_minute_costs_a_minute(tmp_path, expected):
    """Its file system takes no write meanwhile."""
    mount, image = tmp_path / "run", tmp_path / "image"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(2**28)
    subprocess.run(["mkfs.ext4", "-q", str(image)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True)
    try:
        (mount / "lost+found").rmdir()
        _train_while_frozen(tmp_path, mount, expected)
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def _train_while_frozen(folder: Path, mount: Path, expected: tuple[object, bytes]) -> None:
    with trained(folder) as cluster:
        subprocess.run(["fsfreeze", "--freeze", str(mount)], check=True)
        try:
            at = cluster.step
            time.sleep(60)
            assert cluster.step == at < STEPS
        finally:
            subprocess.run(["fsfreeze", "--unfreeze", str(mount)], check=True)
        assert cluster.wait(cluster.nodes) == [0] * 4
        assert len(ranks(cluster)) == 1
        assert cluster.results() == expected
