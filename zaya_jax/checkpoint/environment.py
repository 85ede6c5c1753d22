"""What a run computes on and with, as its checkpoints record it."""

import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax


def environment() -> dict[str, Any]:
    """What two runs must share for their numbers to be bitwise equal."""
    return {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "platform": jax.default_backend(),
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
    }


def versions() -> dict[str, str]:
    """Of what else a checkpoint's content may depend on."""
    names = ("zaya-jax", "orbax-checkpoint", "tensorstore", "flax", "optax", "grain", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def cpu_name() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
