"""Faults of whole nodes, which are network namespaces: three with a process of the real trainer each, and a spare.

Each test prints what it measured; `benchmarks/soak_nodes.json` has the results of one run. Needs root for namespaces.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.aegis.cluster_helpers import Cluster, Node, can_make_networks, make_nodes
from tests.aegis.storage_log import StorageLog
from tests.compile_helpers import CHEAP
from tests.train_helpers import ROOT
from zaya_jax.aegis.state import STATE, read_fields
from zaya_jax.run.checkpoints import CHECKPOINTS, saved_steps
from zaya_jax.run.fencing import read_token

pytestmark = [pytest.mark.soak, pytest.mark.skipif(not can_make_networks(), reason="needs root for namespaces")]

STEPS = 120
OVERRIDES = ["train.batch.tokens=192", f"phases.0.tokens={STEPS * 192}", "evaluation.every=50", "sample.tokens=4"]
FAULT_AT = 45  # step
DETECTION, ALL_STOP, SPARE_LATER = 5.0, 10.0, 3.0  # seconds allowed


@contextlib.contextmanager
def trained(folder: Path) -> Iterator[Cluster]:
    """A job that has trained some steps."""
    with make_nodes(4) as nodes:
        cluster = Cluster(folder, nodes, 3, STEPS, *OVERRIDES)
        cluster.start_all()
        cluster.wait_for_step(FAULT_AT)
        yield cluster


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> tuple[object, bytes]:
    """The results of the run without faults."""
    with trained(tmp_path_factory.mktemp("undisturbed")) as cluster:
        assert cluster.wait(cluster.nodes) == [0] * 4
        assert not [event for event in cluster.events if event["severity"] in ("warning", "error", "fatal")]
        return cluster.results()


def measure(name: str, cluster: Cluster, began: float, attempt: int = 2) -> dict[str, float]:
    """Seconds from the fault to its detection by the leader, and to the first step after it."""
    events = [event for event in cluster.events if event["unix"] >= began]
    found = [event["unix"] - began for event in events if event["code"] in ("node-lost", "job-stop")]
    steps = [event["unix"] - began for event in events if event["kind"] == "recover" and event["attempt"] == attempt]
    measured = {"detected": round(min(found), 2), "next step": round(min(steps), 2)}
    print(json.dumps({name: measured}), flush=True)
    return measured


def wait_for_attempt(cluster: Cluster, attempt: int, seconds: float = 60) -> float:
    """Wait until processes of that attempt have done a step."""
    deadline = time.monotonic() + seconds
    while not [event for event in cluster.events if event["kind"] == "recover" and event["attempt"] == attempt]:
        assert time.monotonic() < deadline, "\n---\n".join(map(cluster.said, cluster.nodes))
        time.sleep(0.2)
    return time.time()


def ranks(cluster: Cluster) -> list[str]:
    return [event["text"] for event in cluster.leader_events if event["code"] == "job-attempt"]


def find(node: Node, module: str) -> psutil.Process:
    """The process of a node that runs a module: the trainer or the leader."""
    (found,) = [each for pid in node.pids if module in (each := psutil.Process(pid)).cmdline()[:3]]
    return found


def wait_for_copy(cluster: Cluster, node: Node) -> int:
    """Wait until a spare holds the newest checkpoint, and its processes have opened the data; return the step."""
    deadline = time.monotonic() + 120
    while True:
        state = read_fields(cluster.run_dir / "aegis" / STATE, {"nodes": list})
        held = next((each["held"] for each in state.get("nodes", ()) if each["node"] == node.index), None)
        if held is not None and held == max(saved_steps(cluster.run_dir / CHECKPOINTS)):
            return held
        assert time.monotonic() < deadline, "\n---\n".join(map(cluster.said, cluster.nodes))
        time.sleep(0.02)


def wait_for_standby(cluster: Cluster, node: Node) -> psutil.Process:
    """Wait until the trainer of a spare waits for its place."""
    deadline = time.monotonic() + 60
    while True:
        for pid in node.pids:
            with contextlib.suppress(psutil.Error):
                if "zaya_jax.main" in (process := psutil.Process(pid)).cmdline()[:3]:
                    return process
        assert time.monotonic() < deadline, "\n---\n".join(map(cluster.said, cluster.nodes))
        time.sleep(0.05)


def compiled(folder: Path, node: int) -> set[str]:
    """Names of the compiled programs on a node's disk."""
    return {path.name for path in (folder / f"zaya{node}" / "compiled").iterdir()}


def test_a_spare_has_the_checkpoint_the_compiled_programs_and_the_imports_of_a_node_that_is_lost(tmp_path, expected):
    with make_nodes(4) as nodes:
        cluster = Cluster(tmp_path, nodes, 3, STEPS, *OVERRIDES)
        cluster.own_cache = True
        cluster.start_all()
        cluster.wait_for_step(FAULT_AT)
        find(nodes[1], "zaya_jax.main").suspend()  # nothing is new meanwhile, however fast the run is
        held, waiting = wait_for_copy(cluster, nodes[3]), wait_for_standby(cluster, nodes[3])
        deadline = time.monotonic() + 60
        while not (own := compiled(tmp_path, 0)) or not own <= compiled(tmp_path, 3):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        began = time.time()
        nodes[1].send(signal.SIGKILL)
        wait_for_attempt(cluster, 2)
        measure("node killed, each node with a private compilation cache", cluster, began)
        assert find(nodes[3], "zaya_jax.main") == waiting
        restored = [line for line in cluster.said(nodes[0]).splitlines() if line.startswith("Restored")]
        assert len(restored) == 1
        assert restored[0].startswith(f"Restored the checkpoint of step {held}: ")
        assert f"bytes from copies on the nodes, 0 from {cluster.run_dir}" in restored[0]
        assert cluster.wait(nodes) == [0, -signal.SIGKILL, 0, 0]
        assert cluster.results() == expected


def test_a_killed_node_is_replaced_about_as_fast_as_a_killed_process(tmp_path, expected):
    with trained(tmp_path) as cluster:
        began = time.time()
        find(cluster.nodes[1], "zaya_jax.main").kill()
        wait_for_attempt(cluster, 2)
        plain = measure("process killed (plain restart)", cluster, began)
        began = time.time()
        cluster.nodes[1].send(signal.SIGKILL)
        assert cluster.wait(cluster.nodes) == [0, -signal.SIGKILL, 0, 0]
        replaced = measure("node killed", cluster, began, 3)
        assert replaced["detected"] < DETECTION
        assert replaced["next step"] < plain["next step"] + SPARE_LATER
        assert [text.split(", ")[1] for text in ranks(cluster)] == ["1: zaya1-1", "1: zaya1-1", "1: zaya3-3"]
        assert cluster.results() == expected


def test_without_a_spare_the_job_shrinks_and_grows_and_its_numbers_do_not_change(tmp_path):
    """In fp64, the losses are those of one process within 1e-8."""
    steps, x64 = 400, {"JAX_ENABLE_X64": "1"}
    overrides = [
        f"phases.0.tokens={steps * 384}",
        "train.batch.tokens=384",
        "evaluation.every=1000",
        "train.compute_dtype=float64",
    ]
    with make_nodes(3) as nodes:
        cluster = Cluster(tmp_path / "job", nodes, 3, steps, *OVERRIDES, *overrides)
        cluster.flags, cluster.environment = ["--min-nodes", "2"], x64
        cluster.start_all()
        cluster.wait_for_step(FAULT_AT)
        began = time.time()
        nodes[1].send(signal.SIGKILL)
        wait_for_attempt(cluster, 2, 240)
        measure("node killed without a spare, continued on two", cluster, began)
        cluster.start(nodes[1])
        began = time.time()
        wait_for_attempt(cluster, 3, 180)
        measure("it is back, continued on three", cluster, began, 3)
        assert cluster.wait(nodes) == [0] * 3
        assert ranks(cluster) == [
            "Ranks 0: zaya0-0, 1: zaya1-1, 2: zaya2-2",
            "Ranks 0: zaya0-0, 1: zaya2-2",
            "Ranks 0: zaya0-0, 1: zaya2-2, 2: zaya1-1",
        ]
        saved = [event["last_step"] for event in cluster.events if event["kind"] == "end" and event["attempt"] == 2]
        resumed = [event["first_step"] for event in cluster.events if event["kind"] == "end" and event["attempt"] == 3]
        assert set(saved) == set(resumed)  # it grew at a checkpoint, and lost no step
        alone = Cluster(tmp_path / "alone", nodes, 3, steps, *OVERRIDES, *overrides)
        environment = {**os.environ, "XLA_FLAGS": CHEAP, "JAX_PLATFORMS": "cpu", **x64}
        subprocess.run([sys.executable, *alone.trainer], cwd=ROOT, env=environment, check=True, capture_output=True)
    losses = [[json.loads(line)["loss"] for line in each.results()[1].splitlines()] for each in (cluster, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-8)


def test_a_frozen_node_is_replaced_and_returns_twice(tmp_path, expected):
    with trained(tmp_path) as cluster:
        for attempt, index in ((2, 1), (3, 3)):
            began = time.time()
            cluster.nodes[index].send(signal.SIGSTOP)
            wait_for_attempt(cluster, attempt)
            cluster.nodes[index].send(signal.SIGCONT)
            assert measure(f"node frozen ({attempt - 1}), then back", cluster, began, attempt)["detected"] < DETECTION
            while sum("returned" in event["text"] for event in cluster.leader_events) < attempt - 1:
                time.sleep(0.1)
        assert cluster.wait(cluster.nodes) == [0] * 4
        assert [text.split(", ")[1] for text in ranks(cluster)] == ["1: zaya1-1", "1: zaya3-3", "1: zaya1-1"]
        assert cluster.results() == expected


@pytest.mark.parametrize(("sends", "receives"), [(False, False), (False, True), (True, False)])
def test_a_node_that_is_cut_off_is_replaced_and_ends(tmp_path, expected, sends, receives):
    with trained(tmp_path) as cluster:
        node, *_ = cut = [cluster.nodes[1]]
        others = [each for each in cluster.nodes if each not in cut]
        began = time.time()
        node.cut(others, sends=sends, receives=receives)
        assert cluster.wait(cut) == [75]
        assert time.time() - began < ALL_STOP
        assert node.pids == []
        assert cluster.wait(others) == [0] * 3
        name = f"node cut off ({'sends' if sends else 'receives' if receives else 'neither'})"
        assert measure(name, cluster, began)["detected"] < DETECTION
        assert cluster.results() == expected


def test_a_cut_off_trainer_whose_supervisor_is_frozen_writes_nothing_that_counts(tmp_path, expected):
    """Nothing ends it before its peer timeout, when the others have long finished."""
    with trained(tmp_path) as cluster:
        node, others = cluster.nodes[1], [cluster.nodes[index] for index in (0, 2, 3)]
        old, checkpoints = find(node, "zaya_jax.main"), cluster.run_dir / CHECKPOINTS
        supervisor, before = old.ppid(), read_token(checkpoints)
        os.kill(supervisor, signal.SIGSTOP)
        node.cut(others, sends=False, receives=False)
        assert cluster.wait(others) == [0] * 3
        assert old.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        after = read_token(checkpoints)
        assert before is not None
        assert after is not None
        assert after.number > before.number
        assert cluster.results() == expected
        files = written(cluster.run_dir)
        deadline = time.monotonic() + 120
        while old.status() != psutil.STATUS_ZOMBIE:  # its parent is frozen
            assert time.monotonic() < deadline
            time.sleep(0.5)
        assert written(cluster.run_dir) == files
        os.kill(supervisor, signal.SIGCONT)
        assert cluster.wait([node]) == [75]
        assert "sent no heartbeat for 60 s" in cluster.said(node)
        assert cluster.results() == expected


def written(run_dir: Path) -> dict[str, int]:
    """Every file of the run but those of supervisors, with the time of its last change."""
    return {str(path): path.stat().st_mtime_ns for path in run_dir.rglob("*") if "aegis" not in path.parts}


def test_the_loss_of_the_leaders_process_disturbs_nothing(tmp_path, expected):
    with trained(tmp_path) as cluster:
        for number in (signal.SIGKILL, signal.SIGSTOP):
            began = time.time()
            joined = sum(event["code"] == "node-joined" for event in cluster.leader_events)
            find(cluster.nodes[0], "zaya_jax.aegis.leader").send_signal(number)
            while sum(event["code"] == "node-joined" for event in cluster.leader_events) < joined + 4:
                time.sleep(0.02)
            print(json.dumps({f"leader's process: {number.name}, all back": round(time.time() - began, 2)}), flush=True)
        assert cluster.wait(cluster.nodes) == [0] * 4
        assert len(ranks(cluster)) == 1
        assert cluster.results() == expected


def test_the_loss_of_the_leaders_node_ends_the_job_and_a_new_start_resumes_it(tmp_path, expected):
    with trained(tmp_path) as cluster:
        began = time.time()
        cluster.nodes[0].send(signal.SIGKILL)
        assert cluster.wait(cluster.nodes[1:]) == [75] * 3
        seconds = time.time() - began
        print(json.dumps({"leader's node killed, all stopped": round(seconds, 2)}), flush=True)
        assert seconds < ALL_STOP
        assert all("has sent nothing for 8 s" in cluster.said(node) for node in cluster.nodes[1:])
        assert all(node.pids == [] for node in cluster.nodes)
        cluster.start_all()
        assert cluster.wait(cluster.nodes) == [0] * 4
        assert cluster.results() == expected


def test_no_node_is_lost_by_mistake_beside_busy_processes(tmp_path, expected):
    """Eight processes that compute beside the job: slow is not silent."""
    with trained(tmp_path) as cluster, contextlib.ExitStack() as stack:
        for _ in range(8):
            busy = psutil.Popen(["sh", "-c", "while :; do :; done"])
            stack.callback(lambda busy=busy: (busy.kill(), busy.wait()))
        assert cluster.wait(cluster.nodes) == [0] * 4
        assert len(ranks(cluster)) == 1
        assert cluster.results() == expected


def test_the_leaders_node_is_cut_off_and_the_job_resumes_elsewhere_while_it_lives(tmp_path, expected):
    """The scheduler starts the job on the other nodes. The old side writes nothing more, and ends with 96."""
    with trained(tmp_path) as cluster:
        old, others = cluster.nodes[0], cluster.nodes[1:]
        trainer = find(old, "zaya_jax.main")
        old.cut(others, sends=False, receives=False)
        began = time.time()
        assert cluster.wait(others) == [75] * 3
        assert time.time() - began < ALL_STOP
        assert not trainer.is_running()
        before = read_token(cluster.run_dir / CHECKPOINTS)
        assert before is not None
        for node in others:
            cluster.start(node, others)
        while (token := read_token(cluster.run_dir / CHECKPOINTS)) is None or token.number == before.number:
            time.sleep(0.05)
        with StorageLog([cluster.run_dir, cluster.run_dir / CHECKPOINTS]) as log:
            assert cluster.wait([old]) == [96]
            assert cluster.wait(others) == [0] * 3
            assert log.writes
            assert trainer.pid not in {write.pid for write in log.writes}
        assert cluster.results() == expected
