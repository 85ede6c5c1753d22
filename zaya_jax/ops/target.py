"""What the program is compiled for; a static value, so that it is part of every jit key."""

import dataclasses

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


def current_target() -> Target:
    """The default device of this process."""
    device = jax.devices()[0]
    platform = device.platform
    if platform == "gpu":
        platform = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return Target(platform, device.device_kind)
