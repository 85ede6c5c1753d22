"""A training process ends when its supervisor does, whatever programs stand between them."""

import contextlib
import os
import select
import signal
import threading
from collections.abc import Mapping

from zaya_jax.run.progress_record import VARIABLE, supervisor_pid


def end_with_supervisor(environment: Mapping[str, str] = os.environ) -> None:
    """Kill this process' group when its supervisor ends; do nothing without a supervisor.

    The kernel kills the supervisor's own child, but not a trainer behind a shell. The group is that of the command
    which the supervisor started, with its shell and data workers.
    """
    pid = supervisor_pid(environment.get(VARIABLE, ""))
    if pid is None:
        return
    with contextlib.suppress(OSError):  # it has ended; its child is killed in any case
        supervisor = os.pidfd_open(pid)
        threading.Thread(target=_wait, args=(supervisor,), name="supervisor", daemon=True).start()


def _wait(supervisor: int) -> None:
    poll = select.poll()
    poll.register(supervisor, select.POLLIN)
    poll.poll()
    os.killpg(0, signal.SIGKILL)
