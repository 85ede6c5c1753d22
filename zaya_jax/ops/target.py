"""What the program is compiled for: a static value, known when it is traced."""

import dataclasses
from typing import Any

import jax

from pallas_kernels.tiles import PLATFORMS


@dataclasses.dataclass(frozen=True)
class Target:
    """A kind of device.

    Attributes:
      platform: 'cpu', 'cuda' or 'rocm'; 'interpret' has every kernel emulated, on any device.
      device_kind: the runtime's name of the device, e.g. 'NVIDIA H200', 'gfx942'.
      without: operations that are to be done by their references although the platform has a kernel.
    """

    platform: str
    device_kind: str
    without: tuple[str, ...] = ()

    def kernel(self, operation: str) -> str | None:
        """The platform to give to the kernel of `operation`; None where its reference is to be used."""
        return self.platform if self.platform in PLATFORMS and operation not in self.without else None


def target_of(device: Any) -> Target:
    """What `device` is."""
    platform = device.platform
    if platform == "gpu":
        platform = "rocm" if "rocm" in device.client.platform_version.lower() else "cuda"
    return Target(platform, device.device_kind)


def current_target() -> Target:
    """The first device of this process: what is compiled for where nothing else is said."""
    return target_of(jax.devices()[0])
