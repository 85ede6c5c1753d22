"""The network of this machine: interfaces, RDMA devices, plugins for collectives, and what carries traffic."""

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# AMD's plugin for its AI NICs, and the names that RCCL and NCCL load by default.
_PLUGINS = ("librccl-anp.so", "librccl-net.so", "libnccl-net.so")
_FOLDERS = ("/opt/rocm*/lib", "/usr/local/lib", "/usr/lib", "/usr/lib/*-linux-gnu", "/usr/lib64")


def describe_network(root: Path = Path("/"), environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Describe what collectives between nodes can use.

    Args:
      root: root of the file system, with `sys` and `proc`.
      environment: environment variables.

    Returns:
      For JSON: `interfaces`, each with state and speed in Mb/s (None if unknown), without virtual ones; `rdma`, each
      port with link layer, state and rate; `plugins`, each with the files found, and whether this process has loaded
      it, which RCCL and NCCL do at the first collective between nodes.
    """
    net, rdma = root / "sys/class/net", root / "sys/class/infiniband"
    interfaces = {
        folder.name: {"state": _text(folder / "operstate"), "speed": _speed(folder)}
        for folder in sorted(net.glob("*")) if (folder / "device").exists()
    }  # fmt: skip
    ports = {
        f"{port.parent.parent.name}/{port.name}": {
            "link_layer": _text(port / "link_layer"), "state": _text(port / "state"), "rate": _text(port / "rate"),
        }
        for port in sorted(rdma.glob("*/ports/*"))
    }  # fmt: skip
    mapped = _text(root / "proc/self/maps") or ""
    folders = [folder for folder in environment.get("LD_LIBRARY_PATH", "").split(":") if folder]
    plugins = {}
    for name in _PLUGINS:
        patterns = [f"{root}/{folder.lstrip('/')}/{name}*" for folder in (*folders, *_FOLDERS)]
        files = sorted({file for pattern in patterns for file in glob.glob(pattern)})
        if files or name in mapped:
            plugins[name] = {"files": files, "loaded": name in mapped}
    return {"interfaces": interfaces, "rdma": ports, "plugins": plugins}


class Traffic:
    """Counts the bytes that each interface and RDMA port of this host sends and receives from now on.

    It tells which of them carry collectives, or the storage of a folder. Other programs' traffic counts, too.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        """Start to count; `root` is that of the file system with `sys`."""
        self._root, self._before = root, _counters(root)

    def bytes(self) -> dict[str, int]:
        """Return the bytes so far, by interface, or DEVICE/PORT of RDMA; without those that carried nothing."""
        moved = {name: count - self._before.get(name, 0) for name, count in _counters(self._root).items()}
        return {name: count for name, count in sorted(moved.items(), key=lambda item: -item[1]) if count > 0}

    def line(self, what: str) -> str:
        """Return a sentence on what carried `what`; '' if nothing did."""
        carried = ", ".join(f"{name} {count / 1e6:,.1f} MB" for name, count in self.bytes().items())
        return f"The network carried, while {what}: {carried}." if carried else ""


def _counters(root: Path) -> dict[str, int]:
    """Read bytes sent and received; RDMA ports count words of four bytes, and do not appear at their interface."""
    counts = dict[str, int]()
    for folder in root.glob("sys/class/net/*/statistics"):
        counts[folder.parent.name] = sum(_count(folder / name) for name in ("tx_bytes", "rx_bytes"))
    for folder in root.glob("sys/class/infiniband/*/ports/*/counters"):
        port = folder.parent
        counts[f"{port.parent.parent.name}/{port.name}"] = 4 * sum(
            _count(folder / name) for name in ("port_xmit_data", "port_rcv_data")
        )
    return counts


def _count(file: Path) -> int:
    text = _text(file) or ""
    return int(text) if text.isdecimal() else 0


def _speed(folder: Path) -> int | None:
    text = _text(folder / "speed") or ""
    return int(text) if text.isdecimal() else None  # −1 without a link


def _text(file: Path) -> str | None:
    """Return the text of a file; None if it cannot be read, as the speed of an interface that is down."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
