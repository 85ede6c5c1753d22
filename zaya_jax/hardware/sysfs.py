"""The network interfaces and RDMA ports of this machine, as Linux shows them in sysfs.

Formats: Documentation/ABI/stable/sysfs-class-infiniband and testing/sysfs-class-net of the Linux kernel.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from zaya_jax.run.files import read_start

MOST_LINKS = 512
_LONGEST_ATTRIBUTE = 256  # bytes


class Sysfs:
    """Reads attributes, of which each is a short regular file below the root; folders are relative to the root."""

    def __init__(self, root: Path = Path("/sys")) -> None:
        """Read the sysfs that is mounted at `root`."""
        self._root = os.path.realpath(root)

    def interfaces(self, *, physical: bool) -> Iterator[tuple[str, str]]:
        """Yield name and folder of each network interface, with `physical` only of those that have a device."""
        for name in self._entries("class/net"):
            folder = f"class/net/{name}"
            if not physical or os.path.exists(os.path.join(self._root, folder, "device")):
                yield name, folder

    def ports(self) -> Iterator[tuple[str, str]]:
        """Yield name, as DEVICE/PORT, and folder of each InfiniBand or RoCE port."""
        for device in self._entries("class/infiniband"):
            for port in self._entries(f"class/infiniband/{device}/ports"):
                yield f"{device}/{port}", f"class/infiniband/{device}/ports/{port}"

    def text(self, file: str) -> str:
        """Return the start of an attribute; empty if it cannot be read, leads outside the root, or is no file."""
        with contextlib.suppress(OSError, ValueError):
            path = os.path.realpath(os.path.join(self._root, file))
            if os.path.commonpath([path, self._root]) == self._root:
                return read_start(path, _LONGEST_ATTRIBUTE).decode("ascii", "replace").strip()
        return ""

    def count(self, file: str) -> int | None:
        """Return the number in an attribute; None if it holds none that is 0 or more."""
        text = self.text(file)
        return int(text) if text.isascii() and text.isdigit() else None

    def _entries(self, folder: str) -> list[str]:
        try:
            return sorted(os.listdir(os.path.join(self._root, folder)))[:MOST_LINKS]
        except (FileNotFoundError, NotADirectoryError):
            return []
