"""Recognize a job that makes no progress, and tell the process that hangs from those that wait for it."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import psutil

from zaya_jax.aegis.processes import Rank
from zaya_jax.aegis.timeouts import Timeouts
from zaya_jax.run.progress_record import Phase

# In these phases a process waits for others: their connections, collectives, or ends.
WAITING = (Phase.JOIN, Phase.DISPATCH, Phase.DEVICE_WAIT, Phase.END)
_MOST = 0.2  # seconds that pass at most between two looks of a supervisor that runs
_SOON = 1.0  # seconds of silence before the kernel is asked about a process


class Sample(NamedTuple):
    """A process at one moment, as its supervisor sees it."""

    process: int  # its number
    writes: int  # to its progress record; -1 without one
    phase: Phase
    step: int  # number of steps that it has done; -1 if it did not get that far
    silence: float  # seconds without progress, as counted
    quiet: float  # the same by the clock
    limit: float  # seconds that it may be silent in this phase
    is_stopped: bool  # by SIGSTOP or a debugger


class Hang(NamedTuple):
    """A job that makes no progress."""

    suspects: Sequence[int]  # the processes that seem to cause it; all of them if nothing tells them apart
    rank: int | None  # the only one of these; None if there are more
    step: int  # number of steps that it has done; -1 if it did not get that far
    phase: Phase  # of the first process that is over its time
    timeout: float  # of that phase, in seconds
    seconds: float  # of silence that were counted; of the whole job if that process waits for others
    quiet: float  # the same by the clock
    words: str  # what happened, as a sentence

    @property
    def details(self) -> dict[str, Any]:
        """The fields of an event."""
        seconds = {"detect": self.seconds, "timeout": self.timeout, "quiet": self.quiet}
        return {"step": self.step, "phase": self.phase.name.lower(), "seconds": seconds}


class HangWatch:
    """Watches the progress records of one attempt."""

    def __init__(self, timeouts: Timeouts, *, expects_records: bool) -> None:
        """Start; with `expects_records`, a process without a record counts as one that is still starting."""
        self._timeouts, self._expects_records = timeouts, expects_records
        self._silences: dict[int, Silence] = {}

    def look(self, running: Sequence[Rank]) -> list[Sample]:
        """Return samples of the `running` processes, but for those of a command that need not keep a record."""
        samples = []
        for rank in running:
            progress = rank.progress
            if progress is None and not self._expects_records:
                continue
            silence = self._silences.setdefault(rank.index, Silence())
            phase, writes, step = Phase.START, -1, -1
            if progress is not None:
                phase, writes = progress.phase, progress.writes
                step = progress.step if progress.first_step >= 0 else -1
            silence.look(writes)
            limit = self._timeouts.limit(phase, progress)
            is_stopped = silence.seconds > min(limit, _SOON) and _is_stopped(rank)
            state = silence.seconds, time.monotonic() - silence.since, limit, is_stopped
            samples.append(Sample(rank.index, writes, phase, step, *state))
        return samples


def find_hang(samples: Sequence[Sample]) -> Hang | None:
    """Return the hang if one of the processes of a job has been silent for longer than its phase's timeout."""
    # A process that waits is as silent as the whole job: another may just have come back from compiling.
    quietest = min(samples, key=lambda sample: sample.silence, default=None)
    counted = [quietest if quietest and sample.phase in WAITING else sample for sample in samples]
    late = [place for place, sample in enumerate(samples) if counted[place].silence > sample.limit]
    if not late:
        return None
    suspects = find_suspects(samples)
    is_stopped = suspects[0].is_stopped
    if not is_stopped and not {samples[place].process for place in late} & {each.process for each in suspects}:
        return None  # they wait for a process that is within its own time, such as one that compiles
    first, count = samples[late[0]], counted[late[0]]
    numbers = [each.process for each in suspects]
    named = f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
    who = "all processes alike" if len(numbers) == len(samples) > 1 else named
    how = " (stopped by a signal)" if is_stopped else ""
    words = (
        f"No progress for {first.silence:.1f} s in phase {first.phase.name.lower()}, more than its timeout of "
        f"{first.limit:g} s. The cause seems to be {who}{how}."
    )
    rank = numbers[0] if len(numbers) == 1 else None
    return Hang(numbers, rank, suspects[0].step, first.phase, first.limit, count.silence, count.quiet, words)


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


def find_suspects(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return the processes that may cause a hang; all of them if nothing tells them apart.

    The first that applies: processes that are stopped; those without a record; those behind the others, by the number
    of writes to their records. All processes run the same loop, which writes at each step and phase, and one that is
    ahead does not need what it passed.
    """
    least = min(sample.writes for sample in samples)
    groups = [sample for sample in samples if sample.is_stopped], [each for each in samples if each.writes == least]
    return next((group for group in groups if 0 < len(group) < len(samples)), samples)


def _is_stopped(rank: Rank) -> bool:
    """Return whether the kernel shows the trainer as stopped, by SIGSTOP or a debugger."""
    progress = rank.progress
    pid = rank.process.pid if progress is None else progress.pid
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False
