"""The machine that a run shares: free space of its folder, free memory, and kills by the out-of-memory killer."""

from pathlib import Path

import psutil

from zaya_jax.aegis.observation import FaultClass, Observation, Severity

_ROOT = Path("/")
_LEAST_DISK, _LEAST_MEMORY = 0.02, 0.02  # fractions that are free


class HostWatch:
    """Compares disk, memory and the counter of the cgroup with the last look; each problem is told once."""

    def __init__(self, run_dir: Path, root: Path = _ROOT) -> None:
        """Watch the disk of `run_dir`, and the cgroup of this process below `root`, which contains /proc and /sys."""
        self._run_dir, self._root = run_dir, root
        self._kills = self._count_kills()
        self._told: set[str] = set()

    def poll(self) -> list[Observation]:
        """Return what became wrong since the last call."""
        seen = []
        if (kills := self._count_kills()) > self._kills:
            self._kills = kills
            seen.append(Observation("out-of-memory", FaultClass.HOST_MEMORY, Severity.ERROR,
                                    "The out-of-memory killer ended a process of this cgroup."))  # fmt: skip
        memory = psutil.virtual_memory()
        self._tell(seen, "memory-low", FaultClass.HOST_MEMORY, memory.available / memory.total, _LEAST_MEMORY, "memory")
        try:
            disk = psutil.disk_usage(str(self._run_dir))
            self._tell(seen, "disk-low", FaultClass.DISK, disk.free / disk.total, _LEAST_DISK, "the run's disk")
        except OSError:  # the file system is gone for a moment; training reports what it cannot write
            pass
        return seen

    def _tell(
        self, seen: list[Observation], code: str, fault: FaultClass, free: float, least: float, what: str
    ) -> None:
        if free >= least:
            self._told.discard(code)
        elif code not in self._told:
            self._told.add(code)
            seen.append(Observation(code, fault, Severity.WARNING, f"Only {free:.1%} of {what} is free."))

    def _count_kills(self) -> int:
        """Return `oom_kill` of this process' cgroup (version 2 or 1); 0 if it is not known."""
        for line in _read(self._root / "proc/self/cgroup").splitlines():
            number, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            group = Path(path.lstrip("/"))
            if ".." in group.parts:
                continue
            folder = self._root / "sys/fs/cgroup"
            if number == "0":
                counter = _read(folder / group / "memory.events")
            elif controllers == "memory":
                counter = _read(folder / "memory" / group / "memory.oom_control")
            else:
                continue
            for row in counter.splitlines():
                name, _, value = row.partition(" ")
                if name == "oom_kill" and value.isdecimal():
                    return int(value)
        return 0


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(2**14).decode(errors="replace")
    except OSError:
        return ""
