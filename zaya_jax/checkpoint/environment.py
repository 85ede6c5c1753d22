"""The hardware and software environment that checkpoints record."""

import os
import platform
from typing import Any

import jax

from zaya_jax.hardware.detection import cpu_name
from zaya_jax.run.versions import package_version


def environment(kernels: str | None = None) -> dict[str, Any]:
    """Describe what two runs must share for bitwise equal results, with the digest of the table of `kernels`."""
    devices = {"device": jax.devices()[0].device_kind, "devices": jax.device_count()}
    host = {"cpu": cpu_name(), "cpus": len(os.sched_getaffinity(0))}
    packages = {"jax": jax.__version__, "jaxlib": package_version("jaxlib")}
    return {**packages, "platform": jax.default_backend(), **devices, **host, "kernels": kernels}


def versions() -> dict[str, str]:
    """Return the versions of the packages that can affect a checkpoint; 'unknown' without their metadata."""
    names = ("zaya-jax", "orbax-checkpoint", "tensorstore", "flax", "optax", "grain", "numpy")
    return {"python": platform.python_version(), **{name: package_version(name) or "unknown" for name in names}}
