"""The kind of device that a program is compiled for, known when it is traced."""

import dataclasses
from typing import Any

import jax

GPU_PLATFORMS = ("cuda", "rocm")


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device."""

    platform: str  # 'cpu', 'cuda' or 'rocm'; 'interpret' emulates all kernels on any device
    device_kind: str  # the runtime's name for the device, e.g. 'NVIDIA H200', 'AMD Instinct MI300X'.
    # its instruction set, e.g. 'sm_90', 'gfx942', by which kernels choose tile sizes; the platform if it is not known.
    architecture: str = ""

    def __post_init__(self) -> None:
        """Use the platform if the architecture is not known."""
        object.__setattr__(self, "architecture", self.architecture or self.platform)


def target_of(device: Any) -> Target:
    """Return the target of a jax device."""
    if device.platform != "gpu":
        return Target(device.platform, device.device_kind)
    capability = str(getattr(device, "compute_capability", ""))
    if "rocm" in device.client.platform_version.lower():
        return Target("rocm", device.device_kind, capability.partition(":")[0])  # 'gfx942:sramecc+:xnack-'
    return Target("cuda", device.device_kind, capability and f"sm_{capability.replace('.', '')}")  # '9.0'


def current_target() -> Target:
    """Return the target of this process' first device, the default."""
    return target_of(jax.devices()[0])
