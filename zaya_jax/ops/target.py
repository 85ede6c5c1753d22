"""What the program is compiled for: a static value, known when it is traced."""

import dataclasses
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
      platform: 'cpu', 'cuda' or 'rocm'.
      device_kind: the runtime's name of the device, e.g. 'NVIDIA H200', 'gfx942'.
    """

    platform: str
    device_kind: str


def target_of(device: Any) -> Target:
    """What `device` is."""
    platform = device.platform
    if platform == "gpu":
        platform = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return Target(platform, device.device_kind)


def current_target() -> Target:
    """The first device of this process: what is compiled for where nothing else is said."""
    return target_of(jax.devices()[0])
