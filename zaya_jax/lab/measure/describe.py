"""Describe a machine: devices, memory, drivers, and environment variables that affect them."""

import os
import platform
from pathlib import Path
from typing import Any

import jax
import jaxlib.version
import psutil

from zaya_jax.checkpoint.environment import versions
from zaya_jax.hardware.detection import read_file, select_preset
from zaya_jax.lab.measure.installation import DRIVERS, unused_gpu
from zaya_jax.lab.measure.network_devices import describe_network
from zaya_jax.ops.target import current_target

# Variables that affect compilers, runtimes and collectives, and that contain nothing personal.
_PREFIXES = ("XLA_", "NCCL_", "RCCL_", "HSA_", "HIP_", "ROCR_", "CUDA_VISIBLE", "JAX_PLATFORMS", "JAX_NUM_CPU")


def describe_machine() -> dict[str, Any]:
    """Describe this machine, for JSON, memory in bytes; `failed`: a sentence, if JAX does not use its GPU."""
    device, target = jax.devices()[0], current_target()
    drivers = {name: read_file(Path("/", file)).splitlines() for name, file in DRIVERS.values()}
    machine: dict[str, Any] = {"platform": target.platform, "device": target.device_kind}
    machine |= {"devices": jax.device_count(), "runtime": device.client.platform_version}
    machine["device_bytes"] = (device.memory_stats() or {}).get("bytes_limit")
    machine |= {"host_bytes": psutil.virtual_memory().total, "kernel": platform.release()}
    machine["versions"] = {**versions(), "jax": jax.__version__, "jaxlib": jaxlib.version.__version__}
    machine["drivers"] = {name: lines[0] for name, lines in drivers.items() if lines}
    variables = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}
    machine |= {"network": describe_network(), "environment": variables, "preset": select_preset(None).name}
    if problem := unused_gpu(target.platform):
        machine["failed"] = problem
    return machine
