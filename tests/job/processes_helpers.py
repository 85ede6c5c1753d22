"""Jobs of several processes on this machine."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np

from tests.compile_helpers import CHEAP
from tests.devices_helpers import ROOT
from zaya_jax.train.program import PhaseProgram
from zaya_jax.train.state import TrainState, init_counters


@contextmanager
def wide_everywhere() -> Iterator[None]:
    """Arrays of 64 bits in every thread; `jax.enable_x64` is of one alone, and what is restored is made in others."""
    jax.config.update("jax_enable_x64", True)
    try:
        yield
    finally:
        jax.config.update("jax_enable_x64", False)


def random_state(program: PhaseProgram) -> TrainState:
    """In place of `init_state`, which takes longer to compile than a step."""
    rng, abstract = np.random.default_rng(0), program.abstract_state
    params = {name: rng.normal(0, 0.3, x.shape).astype(x.dtype) for name, x in abstract.params.items()}
    balance = {name: np.zeros(x.shape, x.dtype) for name, x in abstract.balance.items()}
    return TrainState(params, balance, program.optimizer.init(params), program.balancer.init(balance),
                      **init_counters(program.config))  # fmt: skip


def free_port() -> int:
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))
        return unbound.getsockname()[1]


def start_job(
    folder: Path, commands: Sequence[Sequence[str]], devices: int = 4, addresses: Sequence[str] | None = None,
    code: str | None = None,
) -> list[subprocess.Popen]:  # fmt: skip
    """A process for each of `commands`, the arguments of `zaya_jax.main`; together they have `devices` devices.

    Args:
      folder: in which each process leaves what it says, `0.log`, `1.log`, …
      commands: of each process.
      devices: simulated CPU devices of the job.
      addresses: at which each process looks for process 0; a free port where None.
      code: Python run before `main` in each process.
    """
    count, port = len(commands), free_port()
    addresses = addresses or [f"127.0.0.1:{port}"] * count
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": str(devices // count), "XLA_FLAGS": CHEAP,
                   "PYTHONWARNINGS": "default"}  # fmt: skip
    if len(set(addresses)) > 1:  # the name of the file with the secret contains the address
        environment["ZAYA_JOB_SECRET"] = str(port)
    run = f"import sys\n{code or ''}\nfrom zaya_jax.main import main\nsys.exit(main(sys.argv[1:]))"
    job = []
    for index, (command, address) in enumerate(zip(commands, addresses, strict=True)):
        flags = ["--coordinator", address, "--processes", str(count), "--process", str(index)]
        with (folder / f"{index}.log").open("w") as log:
            job.append(subprocess.Popen(
                [sys.executable, "-c", run, *command, *(flags if count > 1 else [])], cwd=ROOT, env=environment,
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            ))  # fmt: skip
    return job


def finish_job(folder: Path, processes: Sequence[subprocess.Popen], seconds: float = 400) -> list[tuple[int, str]]:
    """Exit status and output of each process; those that do not end are killed."""
    try:
        for process in processes:
            process.wait(seconds)
    finally:
        for process in processes:
            process.kill()
    return [(process.wait(), (folder / f"{i}.log").read_text(encoding="utf-8")) for i, process in enumerate(processes)]


class Link:
    """Passes TCP connections on to a port of this machine; while it is cut, nothing goes through or is refused."""

    def __init__(self, port: int) -> None:
        self.to = port
        self._open = threading.Event()
        self._open.set()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._open.clear()

    def mend(self) -> None:
        self._open.set()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        self._open.wait()
        while True:
            try:
                far = socket.create_connection(("127.0.0.1", self.to))
                break
            except OSError:  # process 0 does not listen yet
                if threading.Event().wait(0.1):
                    return
        for source, target in ((near, far), (far, near)):
            threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(65536):
                self._open.wait()
                target.sendall(data)
        except OSError:
            pass
        finally:
            source.close()
            target.close()

    def close(self) -> None:
        self._open.set()
        self._server.close()
