"""Everything that is watched besides the processes themselves, in one place for the supervisor to ask."""

import os
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

from zaya_jax.aegis.failure import FaultClass, Observation, Severity
from zaya_jax.aegis.file_worker import FileWorker
from zaya_jax.aegis.gpu_probe import GpuProbe
from zaya_jax.aegis.host import HostWatch
from zaya_jax.aegis.kernel_log import KernelLog
from zaya_jax.aegis.network import NetworkWatch
from zaya_jax.aegis.policy import Policy
from zaya_jax.aegis.processes import Rank
from zaya_jax.aegis.signatures import observe_line
from zaya_jax.aegis.training_watch import LevelChanges, LossWatch, StragglerWatch

_EVERY = 1.0  # seconds between two looks at the machine
_SILENT = 30.0  # seconds after which a run folder that does not answer is reported


class Monitor:
    """Watches the machine for as long as the supervisor runs, and output and training attempt by attempt."""

    def __init__(self, policy: Policy, run_dir: Path, files: FileWorker, changes: LevelChanges = None) -> None:
        """Watch the machine and the disk of `run_dir`, whose files `files` reads; `changes`: see `LossWatch`."""
        self._policy, self._run_dir, self._files, self._changes = policy, run_dir, files, changes
        watch = policy.watch
        self._kernel_log = KernelLog(Path(watch.kernel_log or os.devnull))
        telemetry = None if watch.network_telemetry is None else Path(watch.network_telemetry)
        self._network = NetworkWatch(Path(watch.sysfs), watch.link_down_seconds, telemetry)
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
