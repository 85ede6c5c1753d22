"""Recognize a job that makes no progress, and tell the process that hangs from those that wait for it."""

import time
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import psutil

from zaya_jax.aegis.processes import Rank
from zaya_jax.aegis.timeouts import Timeouts
from zaya_jax.run.progress_record import Phase, Progress

# In these phases a process waits for others: their connections, collectives, or ends.
WAITING = (Phase.JOIN, Phase.DISPATCH, Phase.DEVICE_WAIT, Phase.END)
_MOST = 0.2  # seconds that pass at most between two looks of a supervisor that runs


class Hang(NamedTuple):
    """A job that makes no progress."""

    rank: int | None  # the process that seems to cause it; None if nothing tells them apart
    step: int  # number of steps that it has done; -1 if it did not get that far
    phase: Phase  # of the first process that is over its time
    timeout: float  # of that phase, in seconds
    seconds: float  # of silence that were counted; of the whole job if that process waits for others
    since: float  # when that silence began, of `time.monotonic`
    words: str  # what happened, as a sentence


class HangWatch:
    """Watches the progress records of one attempt."""

    def __init__(self, timeouts: Timeouts, *, expects_records: bool) -> None:
        """Start; with `expects_records`, a process without a record counts as one that is still starting."""
        self._timeouts, self._expects_records = timeouts, expects_records
        self._silences: dict[int, Silence] = {}

    def look(self, running: Sequence[Rank]) -> Hang | None:
        """Return the hang if one of the `running` processes has been silent for longer than its phase's timeout."""
        progress = {rank.index: rank.progress for rank in running}
        if not self._expects_records:  # another command need not write any
            progress = {index: each for index, each in progress.items() if each is not None}
        phases = {index: Phase.START if each is None else each.phase for index, each in progress.items()}
        silences = {index: self._silences.setdefault(index, Silence()) for index in progress}
        for index, each in progress.items():
            silences[index].look(-1 if each is None else each.writes)
        # A process that waits is as silent as the whole job: another may just have come back from compiling.
        quietest = min(silences.values(), key=lambda silence: silence.seconds, default=None)
        counted = {index: quietest if quietest and phases[index] in WAITING else silences[index] for index in progress}
        limits = {index: self._timeouts.limit(phases[index], progress[index]) for index in progress}
        late = [index for index in progress if counted[index].seconds > limits[index]]
        if not late:
            return None
        stopped = [rank.index for rank in running if _is_stopped(rank)]
        suspects = find_suspects(progress, stopped)
        if not set(suspects) & set(late) and not stopped:
            return None  # they wait for a process that is within its own time, such as one that compiles
        first, suspect = late[0], progress[suspects[0]]
        named = f"process{'es' if len(suspects) > 1 else ''} {', '.join(map(str, suspects))}"
        who = "all processes alike" if len(suspects) == len(progress) > 1 else named
        how = " (stopped by a signal)" if suspects[0] in stopped else ""
        words = (
            f"No progress for {silences[first].seconds:.1f} s in phase {phases[first].name.lower()}, more than its "
            f"timeout of {limits[first]:g} s. The cause seems to be {who}{how}."
        )
        rank = suspects[0] if len(suspects) == 1 else None
        step = suspect.step if suspect is not None and suspect.first_step >= 0 else -1
        return Hang(rank, step, phases[first], limits[first], counted[first].seconds, counted[first].since, words)


class Silence:
    """The time for which a process has made no progress, by the supervisor's clock.

    The time between two looks counts at most 0.2 s: a supervisor that was stopped, or whose machine slept, has not seen
    the process be silent.
    """

    def __init__(self) -> None:
        self._writes, self.seconds = -1, 0.0  # of silence, as counted
        self.since = self._looked = time.monotonic()  # when it began

    def look(self, writes: int) -> None:
        """Look at the number of `writes` to the record."""
        now = time.monotonic()
        if writes != self._writes:
            self._writes, self.seconds, self.since = writes, 0.0, now
        else:
            self.seconds += min(now - self._looked, _MOST)
        self._looked = now


def find_suspects(progress: Mapping[int, Progress | None], stopped: Collection[int] = ()) -> list[int]:
    """Return the processes that may cause a hang; all of them if nothing tells them apart.

    The first that applies: processes that are `stopped`; those without a record (None); those behind the others, by the
    number of writes to their records. All processes run the same loop, which writes at each step and phase, and one
    that is ahead does not need what it passed.
    """
    writes = {rank: each.writes for rank, each in progress.items() if each is not None}
    groups = (
        [rank for rank in progress if rank in stopped],
        [rank for rank, each in progress.items() if each is None],
        [rank for rank, count in writes.items() if count == min(writes.values())],
    )
    return next((group for group in groups if 0 < len(group) < len(progress)), list(progress))


def _is_stopped(rank: Rank) -> bool:
    """Return whether the kernel shows the trainer as stopped, by SIGSTOP or a debugger."""
    progress = rank.progress
    pid = rank.process.pid if progress is None else progress.pid
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False
