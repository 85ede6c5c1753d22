"""Measure the memory that is left on this machine, and within the limits of the process' control groups."""

import contextlib
from pathlib import Path

import psutil


def free_memory() -> int:
    """Return the bytes that this process and its children can still allocate, swap included."""
    return min([psutil.virtual_memory().available + psutil.swap_memory().free, *control_groups()])


def control_groups(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> list[int]:
    """Return the bytes left under each cgroup v2 limit of this process; reclaimable caches do not count as used."""
    left = []
    with contextlib.suppress(OSError):
        inside = next((line[3:] for line in own.read_text().splitlines() if line.startswith("0::")), "/").strip("/")
        for folder in (root / inside, *(root / inside).parents):
            with contextlib.suppress(OSError, ValueError, KeyError):
                limit = int((folder / "memory.max").read_text())  # without a limit, the word `max`: a ValueError
                used = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                left += [max(0, limit - int(used["anon"]))] if folder.is_relative_to(root) else []
    return left
