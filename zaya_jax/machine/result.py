"""What every result says beside its figures: the command, the versions, the hardware."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zaya_jax.errors import InputError
from zaya_jax.hardware.detection import cpu_name


def check_request(repeats: int, files: Mapping[str, str | None]) -> None:
    """Check, before anything is measured, that it makes sense and can be written.

    Args:
      repeats: of `--repeats`.
      files: that are written, by flag.

    Raises:
      InputError: `repeats` is below 1, or a file is not in a folder that exists.
    """
    if repeats < 1:
        raise InputError(f"--repeats is {repeats}, but must be at least 1.")
    for flag, name in files.items():
        if name and (Path(name).is_dir() or not Path(name).resolve().parent.is_dir()):
            raise InputError(f"{flag} is {name!r}, but must be a file in an existing folder.")


def describe_run(benchmark: str, size: str, peer: str, packages: Iterable[str]) -> dict[str, Any]:
    """The head of a result.

    Args:
      benchmark: what is measured.
      size: how much of it.
      peer: what it is compared with.
      packages: those whose versions matter, beside this project's and jax's.
    """
    packages = ("zaya-jax", "jax", "jaxlib", *packages)
    return {
        "benchmark": benchmark,
        "size": size,
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "peer": peer,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in packages},
        "hardware": {"machine": platform.machine(), "cpu": cpu_name(), "cpus": len(os.sched_getaffinity(0))},
    }


def write_result(result: dict[str, Any], output: str | None) -> None:
    """Write `result` as JSON, if a file is given."""
    if output:
        Path(output).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def rounded(seconds: Iterable[float]) -> list[float]:
    """To 0.1 ms."""
    return [round(second, 4) for second in seconds]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"
