"""What a machine is: its devices, their memory, drivers, and the environment that changes how they work."""

import os
import platform
from pathlib import Path
from typing import Any

import jax
import psutil

from zaya_jax.ops.target import current_target

# Variables that compilers, runtimes and collectives read, and that say nothing of the person who set them.
_PREFIXES = ("XLA_", "NCCL_", "RCCL_", "HSA_", "HIP_", "ROCR_", "CUDA_VISIBLE", "JAX_PLATFORMS", "JAX_NUM_CPU")


def gpu_of_machine(devices: Path = Path("/dev")) -> str | None:
    """'rocm' or 'cuda' by the device files that the drivers make; None where there are none."""
    if (devices / "kfd").exists():
        return "rocm"
    return "cuda" if any(devices.glob("nvidia*")) else None


def describe_machine() -> dict[str, Any]:
    """Devices, memory in bytes, drivers and environment, as JAX and the system tell them.

    Returns:
      The description; with `failed`, a sentence, where JAX does not use the GPU that the machine has.
    """
    device, target = jax.devices()[0], current_target()
    counted = device.memory_stats() or {}
    found: dict[str, Any] = {
        "platform": target.platform,
        "device": target.device_kind,
        "devices": jax.device_count(),
        "runtime": device.client.platform_version,
        "device_bytes": counted.get("bytes_limit"),
        "host_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "drivers": _drivers(),
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)},
    }
    gpu, asked = gpu_of_machine(), os.environ.get("JAX_PLATFORMS", "")
    if gpu and target.platform == "cpu" and not asked.startswith("cpu"):
        found["failed"] = (f"This machine has a GPU, but JAX found only its CPU: install the plugin with "
                           f"pip install -e '.[{gpu}]', and see what JAX printed above.")  # fmt: skip
    return found


def _drivers() -> dict[str, str]:
    """What the kernel modules of GPUs say of themselves."""
    files = {"amdgpu": Path("/sys/module/amdgpu/version"), "nvidia": Path("/proc/driver/nvidia/version")}
    found = {}
    for name, path in files.items():
        try:
            found[name] = path.read_text(encoding="utf-8").splitlines()[0]
        except (OSError, IndexError):
            continue
    return found
