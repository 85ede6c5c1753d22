"""The hardware and software environment that checkpoints record."""

import os
import platform
from importlib.metadata import version
from typing import Any

import jax

from zaya_jax.hardware.detection import cpu_name


def environment() -> dict[str, Any]:
    """Describe what two runs must share for bitwise equal results."""
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
    """Return the versions of the packages that can affect a checkpoint."""
    names = ("zaya-jax", "orbax-checkpoint", "tensorstore", "flax", "optax", "grain", "numpy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}
