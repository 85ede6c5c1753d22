"""What every result of a benchmark says beside its figures: the command, the versions, the hardware."""

import json
import os
import platform
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zaya_jax.checkpoint.environment import cpu_name
from zaya_jax.errors import InputError


def check_request(repeats: int, output: str | None) -> None:
    """Look before measuring whether it makes sense, and whether the result can be written.

    Raises:
      InputError: `repeats` is below 1, or `output` is no file in a folder that exists.
    """
    if repeats < 1:
        raise InputError(f"--repeats is {repeats}, but must be at least 1.")
    if output and (Path(output).is_dir() or not Path(output).resolve().parent.is_dir()):
        raise InputError(f"--output is {output!r}, but must be a file in a folder that exists.")


def describe_run(benchmark: str, size: str, peer: str, packages: Iterable[str]) -> dict[str, Any]:
    """The head of a result.

    Args:
      benchmark: what is measured.
      size: how much of it.
      peer: what it is compared with.
      packages: those whose versions matter.
    """
    return {
        "benchmark": benchmark,
        "size": size,
        "command": " ".join(["python -m zaya_jax.bench", *sys.argv[1:]]),
        "peer": peer,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
        "hardware": {"machine": platform.machine(), "cpu": cpu_name(), "cpus": len(os.sched_getaffinity(0))},
    }


def write_result(result: dict[str, Any], output: str | None) -> None:
    """Write `result` as JSON, where a file is given."""
    if output:
        Path(output).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
