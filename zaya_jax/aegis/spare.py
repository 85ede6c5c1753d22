"""A node that waits for a rank: it checks its devices, then starts processes that wait for their places."""

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import IO, cast

from zaya_jax.aegis.failure import FaultClass, Observation, Severity
from zaya_jax.aegis.job_state import JobState
from zaya_jax.aegis.processes import Process, ProcessGroup
from zaya_jax.aegis.training_command import TrainingCommand
from zaya_jax.run import job_secret, standby
from zaya_jax.run.standby import send_place

_LONGEST = 900.0  # seconds that the check of the devices may take, as a sick GPU may hang
_AGAIN = 600.0  # seconds until a spare that cannot train is checked again


class Spare:
    """The processes of a node without a rank."""

    def __init__(self, job: JobState, environment: Mapping[str, str]) -> None:
        self._job, self._environment = job, environment
        self._group: ProcessGroup | None = None  # the check of the devices, or the processes on standby
        self._is_checked = False  # whether the devices have passed
        self._started = self._next = 0.0  # when the group was started, and when to check again, of `time.monotonic`

    def keep(self, command: TrainingCommand) -> None:
        """Start what is to run once others train, and note how it ends."""
        if self._group is not None:
            self._watch(self._group)
        elif (member := self._job.member) is not None and member.is_idle_spare and time.monotonic() > self._next:
            # First a check of the devices, then the trainers that wait for their places.
            places = [{"JAX_LOCAL_DEVICE_IDS": str(device), standby.VARIABLE: "1"} for device in command.devices]
            waiting = [(list(command.argv), place) for place in places]
            processes = waiting if self._is_checked else [command.preflight()]
            started = [(argv, {**self._environment, **variables}) for argv, variables in processes]
            self._started = time.monotonic()
            self._next = self._started + _AGAIN
            with contextlib.suppress(OSError):  # the machine is short of something: try again then
                self._group = ProcessGroup(started, self._job.outputs, expects_records=self._is_checked)

    def _watch(self, group: ProcessGroup) -> None:
        group.wait(0)
        for output in self._job.outputs:
            output.flush()
        was_checked, ends = self._is_checked, group.ends
        if not ends and (was_checked or time.monotonic() < self._started + _LONGEST):
            return
        self.end()
        self._is_checked, unfit = not was_checked and bool(ends) and ends[0].status == 0, ""
        if self._is_checked:
            self._next = 0.0
        else:
            code, what = ("standby-ended", "Standby") if was_checked else ("spare-unfit", "The preflight of this spare")
            how = f"ended with status {ends[0].status}" if ends else f"did not end within {_LONGEST:g} s"
            streams = group.ranks[ends[0].rank if ends else 0].streams
            last = [stream.last_lines[-1].decode(errors="replace") for stream in streams if stream.last_lines]
            reason = (ends and ends[0].words) or " ".join(last) or "it printed nothing."
            seen = Observation(code, FaultClass.CRASH, Severity.WARNING, f"{what} {how}: {reason}")
            self._job.log.write_observation(seen)
            if not was_checked:  # without standby, this node can still start from cold
                unfit, self._next = seen.text, time.monotonic() + _AGAIN
        if self._job.member is not None:
            self._job.member.note(unfit=unfit)

    def place(self, command: TrainingCommand, processes: Sequence[Process]) -> ProcessGroup | None:
        """Give the processes on standby their places; None if there are none, or one of them has ended."""
        is_ready, self._is_checked, self._next = self._is_checked, False, 0.0
        if self._group is None or not is_ready:
            return self.end()
        group, self._group = self._group, None
        try:
            for rank, (argv, variables) in zip(group.ranks, processes, strict=True):
                stdin = cast("IO[bytes]", rank.process.stdin)
                send_place(stdin, argv[len(command.argv) :], variables[job_secret.VARIABLE])
        except OSError:
            group.close()
            return None
        return group

    def end(self) -> None:
        """End the processes."""
        if self._group is not None:
            self._group.close()
            self._group = None
