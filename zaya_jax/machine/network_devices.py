"""The network of this machine: interfaces, RDMA devices, and the plugins that carry collectives between nodes."""

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


def _speed(folder: Path) -> int | None:
    text = _text(folder / "speed") or ""
    return int(text) if text.isdecimal() else None  # −1 without a link


def _text(file: Path) -> str | None:
    """Return the text of a file; None if it cannot be read, as the speed of an interface that is down."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
