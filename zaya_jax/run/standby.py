"""A trainer that waits for its place in a job: the supervisor of a spare node starts it ahead of time.

With the environment variable `ZAYA_STANDBY`, it reads its place from its standard input, a line of JSON.
"""

import json
import os
import sys
from typing import IO, NamedTuple

from zaya_jax.errors import ExitCode
from zaya_jax.run import job_secret

VARIABLE = "ZAYA_STANDBY"


class Place(NamedTuple):
    """The place of a process in a job of several."""

    coordinator: str  # HOST:PORT of process 0
    processes: int
    process: int  # from 0
    secret: str  # that all processes share

    def send(self, stdin: IO[bytes]) -> None:
        """Send the place to a trainer that waits; `OSError` if it has ended."""
        stdin.write(json.dumps(self._asdict()).encode() + b"\n")
        stdin.close()


def is_standby() -> bool:
    """True if this process is to wait for its place."""
    return bool(os.environ.get(VARIABLE))


def wait_for_place() -> tuple[str, int, int]:
    """Wait for the place, as --coordinator, --processes and --process; exit if the supervisor has ended."""
    if not (line := sys.stdin.readline()):
        sys.exit(ExitCode.STOPPED)
    place = Place(**json.loads(line))
    os.environ[job_secret.VARIABLE] = place.secret
    return place.coordinator, place.processes, place.process
