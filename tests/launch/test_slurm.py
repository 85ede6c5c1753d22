"""The script for Slurm, submitted to a real Slurm whose nodes are network namespaces; needs root and `slurm-wlm`.

The launch file starts the real supervisors and trainers, with one simulated GPU a node.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.aegis.cluster_helpers import NETWORK, Node, can_make_networks, make_nodes
from tests.compile_helpers import CHEAP
from tests.train_helpers import ROOT, write_run
from zaya_jax.aegis.events import EVENTS, read_events
from zaya_jax.run.folder import METRICS

HAS_SLURM = shutil.which("slurmctld") is not None and shutil.which("slurmd") is not None
pytestmark = [pytest.mark.soak, pytest.mark.skipif(not (HAS_SLURM and can_make_networks()), reason="needs root, Slurm")]

STEPS = 120
CONF = """ClusterName=zaya
SlurmctldHost={controller}
SlurmUser=root
AuthType=auth/none
CredType=cred/none
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmdPidFile={folder}/%n.pid
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdLogFile={folder}/%n.log
SlurmctldLogFile={folder}/slurmctld.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=sched_min_interval=100000
SlurmdParameters=config_overrides
GresTypes=gpu
ReturnToService=2
SlurmdTimeout=10
KillWait=5
MaxNodeCount=8
NodeName={nodes} CPUs=2 Gres=gpu:1 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """A controller, and a daemon on each node of the cluster."""

    def __init__(self, folder: Path, nodes: list[Node], stack: contextlib.ExitStack) -> None:
        self.folder, (*self.nodes, self.controller), self._stack = folder, nodes, stack
        names = f"zaya[0-{len(self.nodes) - 1}]"
        text = CONF.format(folder=folder, controller=f"zaya{len(self.nodes)}", nodes=names)
        (folder / "slurm.conf").write_text(text, encoding="utf-8")
        (folder / "gres.conf").write_text(f"NodeName={names} Name=gpu File=/dev/null\n", encoding="utf-8")
        (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n", encoding="utf-8")
        self._environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf"), "PYTHON": sys.executable,
                             "XLA_FLAGS": CHEAP, "JAX_PLATFORMS": "cpu", "SPARES": "1"}  # fmt: skip
        (folder / "state").mkdir()
        self._start(self.controller, "slurmctld", "-D", "-i")
        for node in self.nodes:
            self.start(node)

    def start(self, node: Node) -> None:
        self._start(node, "slurmd", "-D", "-N", f"zaya{node.index}")

    def _start(self, node: Node, *command: str) -> None:
        name = f"zaya{node.index}"
        (self.folder / name).mkdir(exist_ok=True)
        # slurmd wants a hierarchy of control groups, which it does not use here.
        enter = 'hostname "$0" && mount -t tmpfs none /sys/fs/cgroup && exec "$@"'
        started = ["ip", "netns", "exec", node.name, "unshare", "--uts", "sh", "-c", enter, name]
        with (self.folder / f"output-{node.index}").open("ab") as output:
            process = subprocess.Popen([*started, *command], env=self._environment, stdin=subprocess.DEVNULL,
                                       stdout=output, stderr=output, start_new_session=True)  # fmt: skip
        self._stack.callback(lambda: (node.send(signal.SIGKILL), process.wait()))

    def call(self, *command: str) -> str:
        """The output of a command of Slurm on the controller's node."""
        run = ["ip", "netns", "exec", self.controller.name, *command]
        done = subprocess.run(run, env=self._environment, cwd=ROOT, capture_output=True, text=True, check=False)
        return done.stdout + done.stderr

    def state(self, job: str) -> str:
        """State of the job, how often it was restarted, and its exit code."""
        shown = self.call("scontrol", "show", "job", job)
        return " ".join(re.findall(r"\b(?:JobState|Restarts|ExitCode)=\S+", shown))

    def until(self, is_so: Callable[[], object], seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            logs = [path.read_text(errors="replace")[-3000:] for path in sorted(self.folder.glob("*.log"))]
            assert time.monotonic() < deadline, "\n---\n".join([self.call("sinfo"), self.call("squeue"), *logs])
            time.sleep(0.2)


@pytest.fixture
def slurm(tmp_path) -> Iterator[Slurm]:
    with make_nodes(5) as nodes, contextlib.ExitStack() as stack:
        made = Slurm(tmp_path, nodes, stack)
        made.until(lambda: "idle" in made.call("sinfo") and re.search(r"\b4\s+idle", made.call("sinfo")))
        yield made


def steps(run: Path) -> int:
    return (run / METRICS).read_bytes().count(b"\n") if (run / METRICS).exists() else 0


def is_on_standby(node: Node) -> bool:
    commands = [Path(f"/proc/{pid}/cmdline") for pid in node.pids]
    return any(b"zaya_jax.main" in path.read_bytes().split(b"\0")[:3] for path in commands if path.exists())


def test_slurm_replaces_a_lost_node_by_a_spare_and_requeues_the_job_once_none_is_left(slurm, tmp_path):
    assert NETWORK in slurm.call("cat", "/etc/hosts")
    run = tmp_path / "run"
    options = ["--nodes=4", "--cpus-per-task=1", "--gpus-per-node=1", f"--output={tmp_path}/job.log"]
    trainer = ["--config", str(write_run(tmp_path)), "checkpoint.every=10", "train.batch.tokens=192",
               f"phases.0.tokens={STEPS * 192}", "evaluation.every=1000", "sample.tokens=4",
               f"run_dir={run}"]  # fmt: skip
    said = slurm.call("sbatch", *options, str(ROOT / "launch/zaya.sbatch"), *trainer)
    job = said.split()[-1]
    assert said == f"Submitted batch job {job}\n"
    slurm.until(lambda: steps(run) >= 25)
    slurm.until(lambda: is_on_standby(slurm.nodes[3]))
    assert not [event for event in read_events(run / "aegis" / EVENTS) if event["code"] == "node-unfit"]
    slurm.nodes[1].send(signal.SIGKILL)
    slurm.until(lambda: len([e for e in read_events(run / "aegis" / EVENTS) if e["code"] == "job-attempt"]) == 2)
    at = steps(run)
    slurm.until(lambda: steps(run) >= at + 10)
    assert "JobState=RUNNING Restarts=0" in slurm.state(job)
    slurm.nodes[2].send(signal.SIGKILL)
    slurm.until(lambda: "Restarts=1" in slurm.state(job))  # after a minute in which a node may come back
    for node in slurm.nodes[1:3]:
        slurm.start(node)
    slurm.until(lambda: steps(run) == STEPS)
    slurm.until(lambda: "JobState=COMPLETED Restarts=1 ExitCode=0:0" in slurm.state(job))
    attempts = [event for event in read_events(run / "aegis" / EVENTS) if event["code"] == "job-attempt"]
    assert [event["text"].split(", ")[1] for event in attempts] == ["1: zaya1-1", "1: zaya3-3", "1: zaya1-1"]
