"""Detect the processor, accelerator and huge pages from system files, without loading driver libraries."""

import hashlib
import os
import platform
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from zaya_jax.hardware.data_sheets import HARDWARE
from zaya_jax.hardware.presets import PRESETS, Preset

_ROOT = Path("/")
Execute = Callable[[str, list[str], dict[str, str]], None]  # as `os.execve`


def select_preset(name: str | None, root: Path = _ROOT, environment: Mapping[str, str] = os.environ) -> Preset:
    """Return the preset of this name; None selects that of the first detected accelerator, or `cpu`.

    `root` contains `/sys`, `/proc` and `/dev`, and `JAX_PLATFORMS` of the environment can restrict jax to the CPU.
    """
    if name is None and not environment.get("JAX_PLATFORMS", "").startswith("cpu"):
        kinds = {kind: name for name, sheet in HARDWARE.items() for kind in sheet.kinds}
        name = next((kinds[word] for word in [*_amd_targets(root), *_nvidia_models(root)] if word in kinds), None)
    return PRESETS[name or "cpu"]


def detect_gpu_plugin(root: Path = _ROOT) -> str | None:
    """Return the pip extra for this machine's GPUs, 'rocm' or 'cuda'; None without a driver's device files."""
    if (root / "dev" / "kfd").exists():
        return "rocm"
    return "cuda" if any(root.glob("dev/nvidia*")) else None


def cpu_name(root: Path = _ROOT) -> str:
    """Return the processor's name as the system reports it."""
    names = re.findall(r"^model name\s*: (.+)$", read_file(root / "proc" / "cpuinfo"), re.MULTILINE)
    return names[0].strip() if names else platform.processor() or platform.machine()


def cpu_digest(root: Path = _ROOT) -> str:
    """Return a digest of the processor's name and instruction sets, on which compiled programs depend."""
    lines = re.findall(r"^(?:model name|flags|Features)\s*:.*$", read_file(root / "proc" / "cpuinfo"), re.MULTILINE)
    return hashlib.sha256("\n".join([platform.machine(), *sorted(set(lines))]).encode()).hexdigest()[:12]


def _amd_targets(root: Path) -> Iterator[str]:
    """Yield target names such as 'gfx942' (which MI325X shares with MI300X)."""
    if not (root / "dev" / "kfd").exists():  # a container sees the host's topology even if it has no GPU
        return
    for file in sorted(root.glob("sys/class/kfd/kfd/topology/nodes/*/properties")):
        if version := re.search(r"^gfx_target_version (\d+)(\d\d)(\d\d)$", read_file(file), re.MULTILINE):
            major, minor, stepping = map(int, version.groups())
            yield f"gfx{major}{minor:x}{stepping:x}"


def _nvidia_models(root: Path) -> Iterator[str]:
    """Yield the words of each model's name."""
    for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information")):
        yield from re.findall(r"\w+", "".join(re.findall(r"^Model:(.*)$", read_file(file), re.MULTILINE)))


def read_file(path: Path) -> str:
    """Return the text of a file; empty if there is none, or this process has no access to what it describes."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def use_huge_pages(
    root: Path = _ROOT, environment: Mapping[str, str] = os.environ, execute: Execute = os.execve
) -> None:
    """Start this program again with glibc's tunable for huge pages, which is only read at the start of a process.

    XLA allocates the temporaries of every step anew, and their pages cost time: on two cores of an AMD EPYC, the step
    of `configs/tiny.yaml` takes 13 % less time. Nothing happens where huge pages are always used or never, or where
    `GLIBC_TUNABLES` is set. Other C libraries ignore the variable.
    """
    setting, tunables = read_file(root / "sys/kernel/mm/transparent_hugepage/enabled"), "GLIBC_TUNABLES"
    if "[madvise]" in setting and tunables not in environment:
        execute(sys.executable, sys.orig_argv, {**environment, tunables: "glibc.malloc.hugetlb=1"})
