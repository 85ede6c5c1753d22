"""A trainer that waits for its place in a job: the supervisor of a spare node starts it ahead of time.

With the environment variable `ZAYA_STANDBY`, it reads the rest of its arguments from its standard input, in JSON.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import IO

from zaya_jax.errors import ExitCode
from zaya_jax.run import job_secret

VARIABLE = "ZAYA_STANDBY"


def send_place(stdin: IO[bytes], arguments: Sequence[str], secret: str) -> None:
    """Send a trainer that waits its further arguments and the secret of its job; `OSError` if it has ended."""
    stdin.write(json.dumps([*arguments, secret]).encode() + b"\n")
    stdin.close()


def is_standby() -> bool:
    """True if this process is to wait for its place."""
    return bool(os.environ.get(VARIABLE))


def wait_for_place() -> list[str]:
    """Return all arguments of this process, once it has a place; exit if the supervisor has ended."""
    if not (line := sys.stdin.readline()):
        sys.exit(ExitCode.STOPPED)
    *arguments, os.environ[job_secret.VARIABLE] = json.loads(line)
    return [*sys.argv[1:], *arguments]
