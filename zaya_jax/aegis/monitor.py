"""Everything that is watched besides the processes themselves, in one place for the supervisor to ask."""

import dataclasses
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import psutil

from zaya_jax.aegis.failure import FaultClass, Observation, Severity
from zaya_jax.aegis.file_worker import FileWorker
from zaya_jax.aegis.gpu_probe import GpuProbe
from zaya_jax.aegis.kernel_log import KernelLog
from zaya_jax.aegis.network import NetworkWatch
from zaya_jax.aegis.policy import Policy
from zaya_jax.aegis.processes import Rank
from zaya_jax.aegis.signatures import observe_line
from zaya_jax.aegis.training_watch import LevelChanges, LossWatch, StragglerWatch
from zaya_jax.config.checks import counted
from zaya_jax.run.files import start_text
from zaya_jax.run.host_memory import OWN, ROOT, memory_groups

_EVERY = 1.0  # seconds between two looks at the machine
_SILENT = 30.0  # seconds after which a run folder that does not answer is reported

_GB = 1e9
_DISK = 20 * _GB, 2 * _GB  # free bytes of the run folder's file system below which a warning and an error are due
_MEMORY = 0.05, 0.02  # available share of the host's memory, likewise
_MARGIN = 1.1  # a level ends above its threshold times this, so that a value near it is reported once
_KILLS = {1: "memory.oom_control", 2: "memory.events"}  # file of a group by version of cgroups


class Monitor:
    """Watches the machine for as long as the supervisor runs, and output and training attempt by attempt."""

    def __init__(self, policy: Policy, run_dir: Path, files: FileWorker, changes: LevelChanges = None) -> None:
        """Watch the machine and the disk of `run_dir`, whose files `files` reads; `changes`: see `LossWatch`."""
        self._policy, self._run_dir, self._files, self._changes = policy, run_dir, files, changes
        watch = policy.watch
        self._kernel_log = KernelLog(Path(watch.kernel_log or os.devnull))
        self._network = NetworkWatch(Path(watch.sysfs), watch.link_down_seconds)
        self._host = HostWatch(run_dir)
        self._disk: Future[list[Observation]] | None = None  # what is being read
        self._is_silent = False  # whether the run folder has not answered for long
        self._gpus = GpuProbe(watch.gpu_seconds, watch.gpu_timeout)
        self._looked = float("-inf")
        self.start_attempt()
        self._new: list[Observation] = []
        if self._kernel_log.problem:
            self._new.append(Observation("kernel-log", FaultClass.GPU, Severity.INFO, self._kernel_log.problem))

    def start_attempt(self) -> None:
        """Forget the losses and times of the attempt before."""
        policy = self._policy.training
        self._loss, self._straggler = LossWatch(policy, self._changes), StragglerWatch(policy)

    @property
    def pids(self) -> list[int]:
        """Processes of the supervisor's own, which are not the trainer's."""
        return self._gpus.pids

    def poll(self, ranks: Sequence[Rank], now: float) -> list[Observation]:
        """Return what is new since the last call; `ranks` are all processes of the attempt."""
        progress = {rank.index: each for rank in ranks if (each := rank.progress) is not None and each.first_step >= 0}
        seen, self._new = self._new, []
        if (first := progress.get(0)) is not None:
            bad = self._loss.look(first.step, first.loss, first.first_step)
            seen += [] if bad is None else [bad]
        if len(progress) == len(ranks) > 1:
            seen += self._straggler.look(progress)
        return seen if now - self._looked < _EVERY else [*seen, *self.poll_machine(now)]

    def poll_machine(self, now: float) -> list[Observation]:
        """Return what is new of the machine at `now` of `time.monotonic`."""
        self._looked = now
        seen = [each for line in self._kernel_log.read() if (each := observe_line("kernel", line)) is not None]
        return [*seen, *self._network.poll(now), *self._host.poll(), *self._gpus.poll(now), *self.poll_folder()]

    def poll_folder(self) -> list[Observation]:
        """Return what is new of the run folder: its free space, and whether its file system answers."""
        seen: list[Observation] = []
        seconds = self._files.silent_seconds
        if (seconds > _SILENT) != self._is_silent:
            self._is_silent = not self._is_silent
            system = f"The file system of {self._run_dir}"
            text = f"{system} has not answered for {seconds:.0f} s. The supervisor continues without it."
            silent = Observation("folder-silent", FaultClass.DISK, Severity.ERROR, text)
            answers = Observation("folder-answers", FaultClass.DISK, Severity.INFO, f"{system} answers again.")
            seen.append(silent if self._is_silent else answers)
        if self._disk is None or self._disk.done():
            if self._disk is not None and self._disk.exception() is None:
                seen += self._disk.result()
            self._disk = self._files.submit(self._host.poll_disk)
        return seen

    def close(self) -> None:
        """Stop watching."""
        self._gpus.close()
        self._kernel_log.close()


class HostWatch:
    """Reports a host that runs out of disk or memory, each level once until it ends."""

    def __init__(self, run_dir: Path, cgroup_root: Path = ROOT, own_cgroup: Path = OWN) -> None:
        """Watch this host, and the disk of `run_dir`, which may not exist yet; see `memory_groups` for the others."""
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
            for line in start_text(folder / _KILLS[version]).splitlines():
                name, _, count = line.partition(" ")
                if name == "oom_kill" and count.isascii() and count.isdigit():
                    return int(count)
        return None
