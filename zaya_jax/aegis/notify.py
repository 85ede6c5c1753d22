"""Notify people: run the site's own command for each severe event, without ever waiting for it.

The command is a list of arguments, run without a shell, with the event as one line of JSON on its standard input. It
runs in a session of its own, which is killed at the timeout.
"""

import contextlib
import functools
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import psutil

from zaya_jax.aegis.observation import Severity
from zaya_jax.aegis.policy import NotifyPolicy
from zaya_jax.aegis.processes import die_with_parent

_MOST_RUNNING = 10
_ORDER = {str(severity): index for index, severity in enumerate(Severity)}


class _Running(NamedTuple):
    process: subprocess.Popen[bytes]
    deadline: float  # of `time.monotonic`


class Notifier:
    """Runs the command of a policy for each event that is severe enough.

    Failures never reach the caller.

    Attributes:
      failed: number of commands that could not be started, were killed at the timeout, or returned an error.
      dropped: number of events that were not passed on because ten commands were running.
    """

    def __init__(self, policy: NotifyPolicy) -> None:
        """Follow `policy`; without a command, do nothing."""
        self._policy = policy
        self._running: list[_Running] = []
        self.failed = self.dropped = 0

    def send(self, event: Mapping[str, Any]) -> None:
        """Start the command for `event`, unless it is less severe than the policy asks for."""
        policy = self._policy
        if not policy.command or _ORDER.get(event.get("severity", ""), 0) < _ORDER[policy.severity]:
            return
        self.poll()
        if len(self._running) >= _MOST_RUNNING:
            self.dropped += 1
            return
        try:
            process = start_command(policy.command, event)
        except (OSError, ValueError, TypeError, subprocess.SubprocessError):
            self.failed += 1
        else:
            self._running.append(_Running(process, time.monotonic() + policy.timeout_seconds))

    def poll(self) -> None:
        """Note the commands that ended, and kill those that are over their time; call it now and then."""
        running, self._running = self._running, []
        for each in running:
            status = each.process.poll()
            if status is not None:
                self.failed += status != 0
                continue
            if time.monotonic() >= each.deadline:
                _kill(each.process)  # not waited for: it may hang in the kernel
            self._running.append(each)

    def close(self, seconds: float) -> None:
        """Wait at most `seconds` for the commands that still run, then kill them."""
        self._wait(seconds)
        for each in self._running:
            _kill(each.process)
        self._wait(1.0)

    @property
    def pids(self) -> set[int]:
        """The processes of the commands that run, which whoever ends orphans must spare."""
        pids = set()
        for each in self._running:
            with contextlib.suppress(psutil.NoSuchProcess):
                command = psutil.Process(each.process.pid)
                pids |= {process.pid for process in (command, *command.children(recursive=True))}
        return pids

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self.poll()
        while self._running and time.monotonic() < deadline:
            time.sleep(0.02)
            self.poll()


def start_command(command: Sequence[str], event: Mapping[str, Any]) -> "subprocess.Popen[bytes]":
    """Start `command` with `event` on its standard input.

    Raises:
      OSError: the command cannot be started.
      ValueError: an argument contains a null byte.
      TypeError: the event is not JSON.
    """
    line = json.dumps(dict(event)) + "\n"
    # A file in memory rather than a pipe, whose writer waits if nobody reads.
    with os.fdopen(os.memfd_create("zaya-event", os.MFD_CLOEXEC), "w+b") as file:
        file.write(line.encode())
        file.seek(0)
        return subprocess.Popen(  # noqa: S603 (an argument list, without a shell)
            list(command), stdin=file, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            preexec_fn=functools.partial(die_with_parent, os.getpid()),  # noqa: PLW1509 (one thread)
        )  # fmt: skip


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill the session of a process that is not reaped, so that its id is still its own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
