"""Nodes as network namespaces with their own host names, addresses and links, under supervisors of the real trainer."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.aegis.wires import Wires, ip
from tests.compile_helpers import CHEAP
from tests.train_helpers import ROOT, write_run
from zaya_jax.aegis.events import EVENTS, read_events
from zaya_jax.aegis.job_view import merge_events
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.folder import METRICS
from zaya_jax.run.manifest import read_manifest

PORT = 8476
NETWORK = "10.77.31"
OWN = f"z{os.getpid()}"  # starts the names of this process' namespaces
POLICY = {"timeouts": {"data": 120.0, "dispatch": 120.0, "device_wait": 120.0, "floor": 120.0},
          "restart": {"per_hour": 1000, "delays": [0.0], "same_failure": 1000, "no_progress": 1000},
          "settle_seconds": 1.0}  # fmt: skip
# `ip netns exec` gives each node a mount namespace, in which it has private folders for local copies and programs.
OWN_DISK = """for name in local compiled; do
  mkdir -p "$1/$0/$name" "$1/$name" && mount --bind "$1/$0/$name" "$1/$name" || exit 1
done
shift; hostname "$0" && exec "$@\""""


def can_make_networks() -> bool:
    return os.geteuid() == 0 and subprocess.run(["unshare", "--net", "true"], check=False).returncode == 0


class Node:
    """A network namespace, and the supervisor that runs in it."""

    def __init__(self, index: int, wires: Wires) -> None:
        self.index, self.name, self.address = index, f"{OWN}n{index}", f"{NETWORK}.{index + 1}"
        self.wires = wires
        self.process: subprocess.Popen[bytes] | None = None
        ip("netns", "add", self.name)
        wires.plug(self.name, f"{self.address}/24")

    @property
    def pids(self) -> list[int]:
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def send(self, number: int) -> None:
        """Send a signal to every process of the node at once, as a power cut or a paused machine acts."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def cut(self, others: Sequence["Node"], *, sends: bool, receives: bool) -> None:
        """Drop what the node sends, receives, or both."""
        self.wires.cut([self.index], [other.index for other in others], sends=sends, receives=receives)

    def close(self) -> None:
        self.send(signal.SIGKILL)
        if self.process is not None:
            self.process.wait()
        ip("netns", "del", self.name)


class Cluster:
    """A job of `needed` nodes and spares, one process of a tiny model each, that share one folder."""

    def __init__(self, folder: Path, nodes: Sequence[Node], needed: int, steps: int, *overrides: str) -> None:
        self.folder, self.nodes, self.needed, self.steps = folder, nodes, needed, steps
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "policy.yaml").write_text(json.dumps(POLICY), encoding="utf-8")
        self.run_dir = folder / "run"
        self.trainer = [
            "-m", "zaya_jax.main", "--config", str(write_run(folder)), "checkpoint.every=10",
            *overrides, f"run_dir={self.run_dir}", f"checkpoint.local_dir={folder}/local", "--peer-timeout", "60",
        ]  # fmt: skip
        self.own_cache = False  # whether each node keeps compiled programs for itself
        self.flags: list[str] = []  # of all supervisors
        self.environment: dict[str, str] = {}

    def start(self, node: Node, job: Sequence[Node] = ()) -> None:
        """Start the supervisor of a node of the `job`; that of all nodes by default."""
        job = job or self.nodes
        number, spares = str(job.index(node)), str(len(job) - self.needed)
        command = [
            "ip", "netns", "exec", node.name, "unshare", "--uts", "sh", "-c", OWN_DISK, f"zaya{node.index}",
            str(self.folder),
            sys.executable, "-m", "zaya_jax.aegis", "run", "--policy", str(self.folder / "policy.yaml"),
            "--run-dir", str(self.run_dir), "--nodes", str(self.needed), "--spares", spares, "--node", number,
            "--coordinator", f"{job[0].address}:{PORT}", *self.flags, "--", sys.executable, *self.trainer,
        ]  # fmt: skip
        environment = {**os.environ, "XLA_FLAGS": CHEAP, "JAX_PLATFORMS": "cpu", **self.environment}
        if self.own_cache:
            environment["JAX_COMPILATION_CACHE_DIR"] = f"{self.folder}/compiled"
        with (self.folder / f"output-{node.index}").open("ab") as output:
            node.process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output,
                                            stderr=output, env=environment)  # fmt: skip

    def start_all(self) -> None:
        for node in self.nodes:
            self.start(node)

    def said(self, node: Node) -> str:
        return (self.folder / f"output-{node.index}").read_text(encoding="utf-8", errors="replace")

    @property
    def leader_events(self) -> list[dict[str, Any]]:
        return read_events(self.run_dir / "aegis" / EVENTS)

    @property
    def events(self) -> list[dict[str, Any]]:
        return merge_events(self.run_dir)

    @property
    def step(self) -> int:
        """Number of steps whose rows are written."""
        path = self.run_dir / METRICS
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def wait_for_step(self, step: int, seconds: float = 200) -> float:
        """Wait until a step is done; return when it was noticed, of `time.time`."""
        deadline = time.monotonic() + seconds
        while self.step < step:
            assert time.monotonic() < deadline, "\n".join(map(self.said, self.nodes))
            time.sleep(0.02)
        return time.time()

    def wait(self, nodes: Sequence[Node], seconds: float = 300) -> list[int]:
        deadline = time.monotonic() + seconds
        codes = []
        for node in nodes:
            assert node.process is not None
            try:
                codes.append(node.process.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError("\n---\n".join(map(self.said, self.nodes))) from None
        return codes

    def results(self) -> tuple[object, bytes]:
        """The digests of the last checkpoint's arrays, and the rows of metrics."""
        return (read_manifest(self.run_dir / CHECKPOINTS / str(self.steps)).leaves,
                (self.run_dir / METRICS).read_bytes())  # fmt: skip


@contextlib.contextmanager
def make_nodes(count: int) -> Iterator[list[Node]]:
    """Namespaces with wires between them; they, and all that runs in them, are gone at the end."""
    nodes: list[Node] = []
    hosts = "".join(f"{NETWORK}.{index + 1} zaya{index}\n" for index in range(count))
    folders = [Path(f"/etc/netns/{OWN}n{index}") for index in range(count)]
    wires = Wires()
    try:
        for index, folder in enumerate(folders):  # which `ip netns exec` shows as /etc
            folder.mkdir(parents=True)
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + hosts, encoding="utf-8")
            nodes.append(Node(index, wires))
        yield nodes
    finally:
        for node in nodes:
            node.close()
        wires.close()
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
