"""Strangers attack every port of a supervised job for ten minutes, and the results are those of an undisturbed one.

Left alone are the ports of a library, which `find_ports` tells apart: those of Gloo, through which processes on
CPUs exchange arrays, have no secret. jax's coordination service has no port.
"""

import contextlib
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter

import psutil
import pytest

from tests.aegis.real_helpers import Run, undisturbed
from tests.checkpoint.saved_helpers import write_soak
from tests.train_helpers import ROOT
from zaya_jax.run.folder import METRICS
from zaya_jax.run.job_secret import VARIABLE, prove

SECONDS, STEPS, DESCRIPTORS = 600, 100, 256


def processes(supervisor):
    """A supervisor and what it has started; each with its command line."""
    with contextlib.suppress(psutil.Error):
        for process in (supervisor, *supervisor.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                yield process, " ".join(process.cmdline())


def find_ports(supervisor):
    """The ports at which a supervisor listens, and those that its job names for the rendezvous; without Gloo's."""
    ports = set()
    with contextlib.suppress(psutil.Error):
        ports |= {each.laddr.port for each in supervisor.net_connections("inet") if each.status == psutil.CONN_LISTEN}
    for _, command in processes(supervisor):
        if coordinator := re.search(r"--coordinator 127\.0\.0\.1:(\d+)", command):
            ports.add(int(coordinator[1]))
    return ports


class Attack:
    """Threads that connect to `ports()` until the end of the block, with recorded lines, parts of them, and garbage."""

    def __init__(self, find_ports, secret):
        self._find_ports, self._secret = find_ports, secret
        self._end = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(seed,)) for seed in range(4)]
        self._threads.append(threading.Thread(target=self._look))
        self.connections = Counter()  # by port
        self.seen = set()

    def __enter__(self):
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        for thread in self._threads:
            thread.join()

    def _content(self, rng):
        hello = json.dumps({"process": rng.choice([-1, 0, 1, 2]), "processes": 2, "host": "x\x1b[31m\n",
                            "channel": rng.choice(["lines", "service"]), "nonce": "0" * 32})  # fmt: skip
        recorded = f"{hello} {prove(self._secret() or '', 'enter', '1' * 32, hello)}\n".encode()
        content = rng.choice([
            recorded, recorded, rng.randbytes(rng.randrange(1, 5000)), b"!0 \n", b"!2 Error: x\nstop\n", b"ready\n",
            b"welcome\nready\nstop-after 1\n", b"[" * 60_000 + b"\n", b"9" * 200_000, b"\n" * 1000, b"",
            b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        ])  # fmt: skip
        return content[: rng.randrange(len(content) + 1)] if rng.random() < 0.3 else content

    def _look(self):
        while not self._end.wait(0.1):
            self.seen = self.seen | self._find_ports()

    def _run(self, seed):
        rng, held = random.Random(seed), []
        while not self._end.is_set():
            for port in self.seen:  # also those that are closed now, and may open again
                for _ in range(rng.choice([1, 3, 40])):
                    with contextlib.suppress(OSError):
                        held.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                        held[-1].sendall(self._content(rng))
                        self.connections[port] += 1
            while len(held) > rng.choice([0, 40, 100]):
                held.pop(rng.randrange(len(held))).close()
            self._end.wait(rng.choice([0.05, 0.3]))
        for connection in held:
            connection.close()


@contextlib.contextmanager
def few_descriptors():
    """`ulimit -n 256` for what is started meanwhile."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.soak
def test_strangers_at_every_port_change_nothing(tmp_path):
    start, number, attempts, connections, met = time.monotonic(), 0, 0, 0, 0
    expected, end = undisturbed(tmp_path, 2, STEPS), time.monotonic() + SECONDS
    while time.monotonic() < end:
        number += 1
        run = Run(tmp_path, 2, STEPS, f"attacked-{number}")
        with few_descriptors():
            supervised = run.start()
            exporter = subprocess.Popen(
                [sys.executable, "-m", "zaya_jax.aegis", "export", str(run.folder), "--port", "0"], cwd=ROOT,
                stdout=subprocess.DEVNULL,
            )  # fmt: skip
        supervisor, served = psutil.Process(supervised.process.pid), psutil.Process(exporter.pid)

        def find(supervisor=supervisor, served=served):
            return find_ports(supervisor) | find_ports(served)

        def secret(supervisor=supervisor):
            for process, command in processes(supervisor):
                with contextlib.suppress(psutil.Error):
                    if "--coordinator" in command:
                        return process.environ().get(VARIABLE)
            return None

        with Attack(find, secret) as attack:
            for kills in range(1, 3):  # so that there are several starts
                while supervised.process.poll() is None and rows(run) < kills * STEPS // 3:
                    time.sleep(0.2)
                trainers = [process for process, command in processes(supervisor) if "--coordinator" in command]
                if trainers:
                    with contextlib.suppress(psutil.Error):
                        random.choice(trainers).send_signal(signal.SIGKILL)
            status = supervised.wait(600)
            assert exporter.poll() is None
        exporter.kill()
        exporter.wait()
        assert status == 0, supervised.said
        assert run.results() == expected
        assert "Traceback" not in supervised.said, supervised.said
        assert "\x1b" not in supervised.said
        starts = len(supervised.kinds("start"))
        assert starts >= 2
        assert len(attack.seen) == 1 + starts  # that of the exporter, and one for each start
        attempts, connections = attempts + starts, connections + attack.connections.total()
        met += len(attack.connections) - 1
    assert met > attempts / 2
    what = (
        f"jobs of two processes under the supervisor, at `ulimit -n {DESCRIPTORS}`, each killed twice, while strangers "
        "connect to every listening port with recorded lines, parts of them, garbage, and many connections at once; "
        "rows and final parameters are bitwise those of the undisturbed job. Gloo's ports are left alone"
    )
    write_soak("ports", what, start, {"jobs": number, "starts": attempts, "rendezvous attacked": met,
                                      "connections": connections})  # fmt: skip


def rows(run):
    metrics = run.run_dir / METRICS
    return metrics.read_bytes().count(b"\n") if os.path.exists(metrics) else 0
