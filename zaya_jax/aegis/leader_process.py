"""The process of the leader, which the supervisor of node 0 starts and restarts."""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from zaya_jax.aegis.leader import Setup
from zaya_jax.aegis.processes import die_with_parent
from zaya_jax.config.checks import require
from zaya_jax.errors import PeersMissing
from zaya_jax.run.job_secret import VARIABLE
from zaya_jax.run.launcher import split_address
from zaya_jax.run.listening import BIND, listen, open_listener

_KILLED = 2.0  # seconds until a killed process is given up
_LAST_PORT = 2**16 - 1
_SLOW = 20.0  # seconds that it may take to start


def leader_address(coordinator: str) -> tuple[str, int]:
    """Return where the leader listens, HOST and port: at the port after that of process 0, whose address is given.

    Raises `InputError` if there is none.
    """
    host, port = split_address(coordinator, "--coordinator")
    require(
        port < _LAST_PORT, "The port of --coordinator", port, f"less than {_LAST_PORT}, since the leader has the next"
    )
    return host, port + 1


def open_listeners(coordinator: str, seconds: float) -> list[socket.socket]:
    """Listen for the supervisors of other nodes; wait `seconds` for an address that is not up yet.

    `JAX_COORDINATOR_BIND_ADDRESS` overrides the address of process 0, as it does for process 0 itself. `PeersMissing`
    if the address cannot be used.
    """
    host, port = leader_address(os.environ.get(BIND) or coordinator)
    named = f"{host}:{port}"
    try:
        return listen(
            "The leader", host, named, time.monotonic(), seconds, lambda address: open_listener(address, port)
        )
    except OSError as error:
        remedy = "Start node 0 on the host of --coordinator, and leave it the port after that"
        raise PeersMissing(f"The leader of the job cannot listen at {named}: {error.strerror}. {remedy}.") from error


class LeaderProcess:
    """Starts the leader, and starts it again when it has ended or does not answer.

    All methods are to be called from one thread: the kernel kills the process when the thread that started it ends.
    """

    def __init__(self, listeners: Sequence[socket.socket], secret: str, setup: Setup) -> None:
        """Start no process yet; the arguments are those of `Leader`."""
        self._files = [listener.fileno() for listener in listeners]
        arguments = {"listeners": self._files, **setup._asdict()}
        self._argv = [sys.executable, "-m", "zaya_jax.aegis.leader", json.dumps(arguments)]
        self._environment = {**os.environ, VARIABLE: secret}
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0

    @property
    def pids(self) -> list[int]:
        """The process, if it runs."""
        return [] if self._process is None else [self._process.pid]

    def revive(self, *, was_lost: bool) -> None:
        """Start it if it does not run. If the connection to it `was_lost`, or it starts too slowly, kill it before."""
        if self._process is not None and self._process.poll() is None:
            if not was_lost and time.monotonic() < self._started + _SLOW:
                return
            self.end(0)
        self._started = time.monotonic()
        with contextlib.suppress(OSError):  # the machine is short of something: try again
            self._process = subprocess.Popen(  # noqa: S603 (an argument list, without a shell)
                self._argv,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                pass_fds=self._files,
                start_new_session=True,
                preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509
            )

    def end(self, seconds: float) -> None:
        """Wait `seconds` for its end, then kill it."""
        if self._process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it may hang in the kernel
            self._process.wait(_KILLED)
