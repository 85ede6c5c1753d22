"""Notify people: run the site's own command for each severe event, without ever waiting for it.

It gets the event as a line of JSON on its standard input. At the timeout it is killed with all processes that it has
started, which its environment marks, whatever their sessions.
"""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import psutil

from zaya_jax.aegis.failure import Severity
from zaya_jax.aegis.policy import NotifyPolicy
from zaya_jax.aegis.processes import adopt_orphans, die_with_parent

_MOST_RUNNING = 10
_MARK = "ZAYA_NOTIFY"
_ORDER = {str(severity): index for index, severity in enumerate(Severity)}


class _Running(NamedTuple):
    process: subprocess.Popen[bytes]
    deadline: float  # of `time.monotonic`
    mark: str  # in the environment of its processes

    def processes(self) -> list[psutil.Process]:
        """Return what runs of the command, orphans that this process has adopted too."""
        found = {}
        for child in psutil.Process().children(recursive=True):  # parents before their children
            with contextlib.suppress(psutil.Error):
                is_its = child.pid == self.process.pid or child.ppid() in found
                if is_its or child.environ().get(_MARK) == self.mark:
                    found[child.pid] = child
        return list(found.values())

    def kill(self) -> None:
        """Kill them, without waiting: one may hang in the kernel."""
        for process in self.processes():
            with contextlib.suppress(psutil.Error):
                process.kill()


class Notifier:
    """Runs the command of a policy for each event that is severe enough; failures never reach the caller."""

    def __init__(self, policy: NotifyPolicy) -> None:
        """Follow `policy`; without a command, do nothing."""
        self._policy = policy
        self._running: list[_Running] = []

    def send(self, event: Mapping[str, Any]) -> None:
        """Start the command for `event`, unless it is less severe than the policy asks for, or ten are running."""
        policy = self._policy
        if not policy.command or _ORDER.get(event.get("severity", ""), 0) < _ORDER[policy.severity]:
            return
        self.poll()
        if len(self._running) >= _MOST_RUNNING:
            return
        mark, parent = f"{os.getpid()}-{time.monotonic_ns()}", os.getpid()
        with contextlib.suppress(OSError, ValueError, TypeError, subprocess.SubprocessError):
            # A file in memory rather than a pipe, whose writer waits if nobody reads.
            with os.fdopen(os.memfd_create("zaya-event", os.MFD_CLOEXEC), "w+b") as file:
                file.write((json.dumps(dict(event)) + "\n").encode())
                file.seek(0)
                process = subprocess.Popen(  # noqa: S603 (an argument list, without a shell)
                    list(policy.command),
                    env={**os.environ, _MARK: mark},
                    stdin=file,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,  # its orphans stay its descendants
                    preexec_fn=lambda: (die_with_parent(parent), adopt_orphans()),  # noqa: PLW1509
                )
            self._running.append(_Running(process, time.monotonic() + policy.timeout_seconds, mark))

    def poll(self) -> None:
        """Forget the commands that ended, and kill those that are over their time; call it now and then."""
        running, self._running = self._running, []
        for each in running:
            if each.process.poll() is not None and not each.processes():
                continue
            if time.monotonic() >= each.deadline:
                each.kill()
            self._running.append(each)

    def close(self, seconds: float) -> None:
        """Wait at most `seconds` for the commands that still run, then kill them."""
        self._wait(seconds)
        for each in self._running:
            each.kill()
        self._wait(1.0)

    @property
    def pids(self) -> set[int]:
        """The processes of the commands that run, which whoever ends orphans must spare."""
        return {process.pid for each in self._running for process in each.processes()}

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self.poll()
        while self._running and time.monotonic() < deadline:
            time.sleep(0.02)
            self.poll()
