"""A network that swallows what is sent to the coordinator: only a long silence restarts the job."""

import contextlib
import select
import socket
import sys
import threading
import time

import pytest

from tests.aegis.aegis_helpers import Supervised, left_running
from tests.aegis.real_helpers import POLICY, undisturbed
from tests.compile_helpers import CHEAP
from tests.job.processes_helpers import free_port
from tests.train_helpers import write_run
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.folder import METRICS
from zaya_jax.run.job_secret import VARIABLE
from zaya_jax.run.manifest import read_manifest

PEER_TIMEOUT = 4.0  # seconds


class BlackHole:
    """A proxy to `port` that passes on bytes both ways, or nothing at all: no end of a connection, either."""

    def __init__(self, port: int, at: int = 0) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        self._target = port
        self._server = socket.create_server(("127.0.0.1", at))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        self.is_open.wait()
        while True:
            try:
                far = socket.create_connection(("127.0.0.1", self._target), timeout=5)
                break
            except OSError:  # process 0 does not listen yet
                time.sleep(0.05)
        with near, far, contextlib.suppress(OSError):
            far.settimeout(None)
            while True:
                for source in select.select([near, far], [], [])[0]:
                    content = source.recv(65536)
                    self.is_open.wait()
                    if not content:
                        return
                    (far if source is near else near).sendall(content)

    def swallow(self, seconds: float) -> None:
        self.is_open.clear()
        time.sleep(seconds)
        self.is_open.set()

    def close(self) -> None:
        self._server.close()


@pytest.mark.soak
@pytest.mark.parametrize(("seconds", "attempts"), [(2.0, 1), (12.0, 2)])
def test_a_short_silence_of_the_coordinator_restarts_nothing_and_a_long_one_does(tmp_path, seconds, attempts):
    """Two supervisors, as of two nodes. All of the second node's connections pass proxies; that to the leader works."""
    steps = 300
    expected = undisturbed(tmp_path, 2, steps)
    port = free_port()
    hole = BlackHole(port)
    leader = BlackHole(port + 1, hole.port + 1)
    run_dir = tmp_path / "run"
    trainer = [sys.executable, "-m", "zaya_jax.main", "--config", str(write_run(tmp_path)), "--peer-timeout",
               str(PEER_TIMEOUT), "train.batch.micro_batch=2", "checkpoint.every=4", "evaluation.every=5",
               "sample.tokens=4", f"phases.0.tokens={steps * 128}", f"run_dir={run_dir}"]  # fmt: skip
    nodes = [
        Supervised(tmp_path / f"node-{node}", trainer, 1, POLICY, {"XLA_FLAGS": CHEAP, VARIABLE: "secret"},
                   ["--nodes", "2", "--node", str(node), "--coordinator", f"127.0.0.1:{at}"])
        for node, at in enumerate((port, hole.port))
    ]  # fmt: skip
    nodes[0].wait_for(run_dir / CHECKPOINTS / "8", 100)
    hole.swallow(seconds)
    assert [node.wait(600) for node in nodes] == [0, 0], [node.said for node in nodes]
    assert [len(node.kinds("start")) for node in nodes] == [attempts] * 2
    if attempts == 1:
        assert not [fault for node in nodes for fault in node.faults]
    else:
        assert "sent no heartbeat for 4 s" in nodes[0].said + nodes[1].said
    assert (read_manifest(run_dir / CHECKPOINTS / str(steps)).leaves, (run_dir / METRICS).read_bytes()) == expected
    assert not left_running(tmp_path)
    hole.close()
    leader.close()
