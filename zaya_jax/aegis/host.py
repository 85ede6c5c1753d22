"""Watch the host: free space of the run folder, available memory, and processes that the kernel killed for memory."""

import dataclasses
import shutil
from pathlib import Path

import psutil

from zaya_jax.aegis.failure import FaultClass, Observation, Severity
from zaya_jax.config.checks import counted
from zaya_jax.run.host_memory import OWN, ROOT, memory_groups, read_group

_GB = 1e9
_DISK = 20 * _GB, 2 * _GB  # free bytes of the run folder's file system below which a warning and an error are due
_MEMORY = 0.05, 0.02  # available share of the host's memory, likewise
_MARGIN = 1.1  # a level ends above its threshold times this, so that a value near it is reported once
_KILLS = {1: "memory.oom_control", 2: "memory.events"}  # file of a group by version of cgroups


class HostWatch:
    """Reports a host that runs out of disk or memory, each level once until it ends."""

    def __init__(self, run_dir: Path, cgroup_root: Path = ROOT, own_cgroup: Path = OWN) -> None:
        """Watch this host, and the disk of `run_dir`, which may not exist yet.

        Control groups are mounted at `cgroup_root`; `own_cgroup` lists those of this process, which trainers share.
        """
        self._run_dir, self._cgroup_root, self._own_cgroup = run_dir, cgroup_root, own_cgroup
        self._levels = {"disk": 0, "memory": 0}  # 0: enough, 1: warned, 2: error
        self._kills = self._oom_kills()

    def poll(self) -> list[Observation]:
        """Read the memory of the host; return what changed."""
        memory = psutil.virtual_memory()
        share = memory.available / max(1, memory.total)
        text = f"The host has {memory.available / _GB:.3g} of {memory.total / _GB:.3g} GB of memory available."
        return [*self._compare("memory", FaultClass.HOST_MEMORY, share, _MEMORY, text), *self._killed()]

    def poll_disk(self) -> list[Observation]:
        """Read the free space; return what changed. It waits for a network file system whose server is silent."""
        folder = next((path for path in (self._run_dir, *self._run_dir.absolute().parents) if path.exists()), Path("/"))
        try:
            free = shutil.disk_usage(folder).free
        except OSError as error:
            text = f"The file system of {folder} cannot be read: {error.strerror or error}."
            seen = self._compare("disk", FaultClass.DISK, -1.0, _DISK, text)
            return [dataclasses.replace(each, code="disk-unreadable") for each in seen]
        text = f"The file system of {folder} has {free / _GB:.3g} GB free."
        return self._compare("disk", FaultClass.DISK, free, _DISK, text)

    def _compare(
        self, name: str, fault: FaultClass, value: float, limits: tuple[float, float], text: str
    ) -> list[Observation]:
        level, old = sum(value < limit for limit in limits), self._levels[name]
        if level == old or (level < old and value < limits[old - 1] * _MARGIN):
            return []
        self._levels[name] = level
        if level > old:
            return [Observation(f"{name}-low", fault, Severity.ERROR if level == 2 else Severity.WARNING, text)]
        return [] if level else [Observation(f"{name}-recovered", fault, Severity.INFO, text)]

    def _killed(self) -> list[Observation]:
        kills = self._oom_kills()
        new = 0 if kills is None or self._kills is None else kills - self._kills
        self._kills = self._kills if kills is None else kills
        if new <= 0:
            return []
        text = f"The kernel killed {counted(new, 'process', 'es')} of this control group for lack of memory."
        return [Observation("host-out-of-memory", FaultClass.HOST_MEMORY, Severity.ERROR, text)]

    def _oom_kills(self) -> int | None:
        """Return how many processes of this control group were killed for memory; None if that is unknown."""
        for folder, version in memory_groups(self._cgroup_root, self._own_cgroup):
            for line in read_group(folder / _KILLS[version]).splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill" and count.isascii() and count.isdigit():
                    return int(count)
        return None
