"""Measure the memory that is left on this machine, and within the limits of the process' control groups."""

import contextlib
from pathlib import Path

import psutil

from zaya_jax.run.files import start_text

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_LIMITS = {1: ("memory.limit_in_bytes", "total_rss"), 2: ("memory.max", "anon")}  # file, and statistic of what is used


def free_memory() -> int:
    """Return the bytes that this process and its children can still allocate, swap included."""
    return min([psutil.virtual_memory().available + psutil.swap_memory().free, *control_groups()])


def control_groups(root: Path = ROOT, own: Path = OWN) -> list[int]:
    """Return the bytes left under each cgroup limit of this process; reclaimable caches do not count as used."""
    left = []
    for folder, version in memory_groups(root, own):
        file, statistic = _LIMITS[version]
        with contextlib.suppress(ValueError, KeyError):
            limit = int(start_text(folder / file))  # without a limit, the word `max`: a ValueError
            used = dict(line.split() for line in start_text(folder / "memory.stat").splitlines())
            left.append(max(0, limit - int(used[statistic])))
    return left


def memory_groups(root: Path = ROOT, own: Path = OWN) -> list[tuple[Path, int]]:
    """Return candidate folders of this process' memory groups (in the file `own`), inner first, and their version."""
    groups = []
    for line in sorted(start_text(own).splitlines()):  # `0::/group`, or `4:memory:/group`
        _, controllers, name = [*line.split(":", 2), "", ""][:3]
        relative = Path(name.lstrip("/"))
        # With `..`, the group is outside of this container.
        if ".." not in relative.parts and (not controllers or "memory" in controllers.split(",")):
            mount, version = (root / "memory", 1) if controllers else (root, 2)
            groups += [(mount / each, version) for each in (relative, *relative.parents)]
    return groups
