"""The network of this machine: interfaces, RDMA devices, plugins for collectives, and what carries traffic."""

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zaya_jax.hardware.detection import read_file
from zaya_jax.hardware.sysfs import Sysfs

# AMD's plugin for its AI NICs, and the names that RCCL and NCCL load by default.
_PLUGINS = ("librccl-anp.so", "librccl-net.so", "libnccl-net.so")
_FOLDERS = ("/opt/rocm*/lib", "/usr/local/lib", "/usr/lib", "/usr/lib/*-linux-gnu", "/usr/lib64")


def describe_network(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Describe what collectives between nodes can use, for JSON; `root` has `sys` and `proc`.

    `interfaces` have state and speed in Mb/s (None if unknown), without virtual ones; ports of `rdma` link layer, state
    and rate; `plugins` the files found, and whether this process has loaded it, which RCCL and NCCL do at the first
    collective between nodes.
    """
    sysfs, interfaces, ports, plugins = Sysfs(root / "sys"), {}, {}, {}
    for name, folder in sysfs.interfaces(physical=True):
        interfaces[name] = {"state": sysfs.text(f"{folder}/operstate") or None, "speed": sysfs.count(f"{folder}/speed")}
    for name, folder in sysfs.ports():
        ports[name] = {key: sysfs.text(f"{folder}/{key}") or None for key in ("link_layer", "state", "rate")}
    mapped = read_file(root / "proc/self/maps")
    folders = [folder for folder in environment.get("LD_LIBRARY_PATH", "").split(":") if folder]
    for name in _PLUGINS:
        patterns = [f"{root}/{folder.lstrip('/')}/{name}*" for folder in (*folders, *_FOLDERS)]
        files = sorted({file for pattern in patterns for file in glob.glob(pattern)})
        if files or name in mapped:
            plugins[name] = {"files": files, "loaded": name in mapped}
    return {"interfaces": interfaces, "rdma": ports, "plugins": plugins}


class Traffic:
    """Counts the bytes that each interface and RDMA port of this host sends and receives from now on."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._sysfs = Sysfs(root / "sys")
        self._before = _counters(self._sysfs)

    def bytes(self) -> dict[str, int]:
        """Return the bytes so far, by interface, or DEVICE/PORT of RDMA; without those that carried nothing."""
        moved = {name: count - self._before.get(name, 0) for name, count in _counters(self._sysfs).items()}
        return {name: count for name, count in sorted(moved.items(), key=lambda item: -item[1]) if count > 0}

    def line(self, what: str) -> str:
        """Return a sentence on what carried `what`; '' if nothing did."""
        carried = ", ".join(f"{name} {count / 1e6:,.1f} MB" for name, count in self.bytes().items())
        return f"The network carried, while {what}: {carried}." if carried else ""


def _counters(sysfs: Sysfs) -> dict[str, int]:
    """Read bytes sent and received; RDMA ports count words of four bytes, and do not appear at their interface."""

    def total(folder: str, *counters: str) -> int:
        return sum(sysfs.count(f"{folder}/{counter}") or 0 for counter in counters)

    interfaces, ports = sysfs.interfaces(physical=False), sysfs.ports()
    counts = {name: total(f"{folder}/statistics", "tx_bytes", "rx_bytes") for name, folder in interfaces}
    words = ("port_xmit_data", "port_rcv_data")
    return counts | {name: 4 * total(f"{folder}/counters", *words) for name, folder in ports}
