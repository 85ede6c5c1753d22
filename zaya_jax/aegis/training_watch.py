"""Watch the training itself: losses that are not finite or stay high, and a process that is slower than the others."""

import bisect
import math
import statistics
from collections import deque
from collections.abc import Collection, Mapping, Sequence

from zaya_jax.aegis.failure import FaultClass, Observation, Severity
from zaya_jax.aegis.policy import TrainingPolicy
from zaya_jax.config import Config
from zaya_jax.config.stages import phase_steps, schedule_spans, tokens_before
from zaya_jax.run.progress_record import Phase, Progress

_LEAST_STEPS = 16  # steps before losses are compared
_LEAST_DEVIATION = 0.01  # of the loss, relative to the median
# Phases in which a process may wait for others; the rest is its own time.
_SHARED = (Phase.DISPATCH, Phase.DEVICE_WAIT)
# Numbers of steps done, first and last, between which the loss may change its level; None if they are not known.
LevelChanges = Sequence[tuple[int, int]] | None


class LossWatch:
    """Compares each loss with the median of the steps before; the trainer skips single spikes, this sees lasting ones.

    A loss is high if it exceeds the median of the last `spike_window` normal ones by more than `spike_threshold` robust
    standard deviations (1.4826 × the median absolute deviation), the tolerance. Where a phase starts, other data can
    raise the loss for good: if the phases are not known, `spike_steps` high losses are a fault only if their median is
    more than twice the one before or rises by more than the tolerance, or if their deviation exceeds it. Otherwise they
    are a new level, and normal after `spike_window` steps.
    """

    def __init__(self, policy: TrainingPolicy, changes: LevelChanges = None) -> None:
        """Start without a step; losses are not compared with those before one of the `changes` of level."""
        self._policy, self._changes = policy, changes
        self._losses = deque[float](maxlen=policy.spike_window)
        self._high: list[float] = []  # the losses since the last normal one
        # For each of the last steps, the last good one if its loss was not finite, else None.
        self._not_finite = deque[int | None](maxlen=2 * policy.spike_steps)
        self._step, self._good, self._is_reported, self._is_not_finite = -1, 0, False, False

    def look(self, step: int, loss: float, first_step: int = 0) -> Observation | None:
        """Look at the loss after `step` steps; return an observation when it has been bad for `spike_steps` steps.

        `loss` is in nats/token; `first_step` is the number of steps that were done when training started or resumed.
        """
        self._good = max(self._good, first_step)
        if step in (self._step, first_step):
            return None
        before, self._step = max(self._step, first_step), step
        is_finite = math.isfinite(loss)
        self._not_finite.append(None if is_finite else self._good)
        if not is_finite:
            return self._judge_not_finite(step)
        if any(first < step and before <= last for first, last in self._changes or ()):
            self._losses.clear()
        if len(self._losses) >= _LEAST_STEPS:
            median, tolerance = self._center(self._losses)
            if loss > median + tolerance:
                return None if self._is_reported else self._judge(step, loss, median, tolerance)
        self._losses.append(loss)
        self._high, self._is_reported, self._good = [], False, step
        return None

    def _judge_not_finite(self, step: int) -> Observation | None:
        good = [step for step in self._not_finite if step is not None]
        if len(good) == 1:
            self._is_not_finite = False
        if self._is_not_finite or len(good) < self._policy.spike_steps:
            return None
        self._is_not_finite = True
        text = f"The loss was not finite in {len(good)} of {len(self._not_finite)} steps, until step {step}."
        return Observation("loss-not-finite", FaultClass.NON_FINITE, Severity.ERROR, text, None, good[0])

    def _judge(self, step: int, loss: float, median: float, tolerance: float) -> Observation | None:
        steps, high = self._policy.spike_steps, self._high
        high.append(loss)
        if len(high) < steps:
            return None
        (level, _), (newest, spread) = self._center(high[:steps]), self._center(high[-steps:])
        is_level = newest <= min(2 * median, level + tolerance) and spread <= self._policy.spike_threshold * tolerance
        if self._changes is not None or not is_level:
            self._is_reported = True
            value = f"{loss:.4g} after a median of {median:.4g} nats/token"
            text = f"The loss has been high for {len(high)} steps, until step {step}: {value}."
            return Observation("loss-spike", FaultClass.SPIKE, Severity.ERROR, text, None, self._good)
        if len(high) >= self._policy.spike_window:
            self._losses.extend(high)
            self._high, self._good = [], step
        return None

    def _center(self, losses: Collection[float]) -> tuple[float, float]:
        median = statistics.median(losses)
        deviation = 1.4826 * statistics.median(abs(loss - median) for loss in losses)
        return median, self._policy.spike_threshold * max(deviation, _LEAST_DEVIATION * abs(median))


def level_changes(config: Config | None) -> LevelChanges:
    """Return for each phase the numbers of steps done when it starts and when its warm-up ends; None for no config."""
    if config is None:
        return None
    changes = []
    for (first, end), span in zip(phase_steps(config), schedule_spans(config), strict=True):
        warm = span.first_token + span.schedule.warmup_tokens
        steps = bisect.bisect_left(range(first, end), warm, key=lambda step: tokens_before(config, step))
        changes.append((first, first + steps))
    return changes


class StragglerWatch:
    """Compares the time that each process spends by itself, not waiting for others, over windows of steps.

    It sees a slow host or slow data; a GPU that computes slowly looks the same from all processes.
    """

    def __init__(self, policy: TrainingPolicy) -> None:
        self._policy = policy
        self._start: dict[int, Progress] = {}
        self._slow: dict[int, int] = {}  # process → windows in a row in which it was slow

    def look(self, progress: Mapping[int, Progress]) -> list[Observation]:
        """Return the processes that have been slow for `straggler_windows` windows, when a window is complete."""
        if not self._start or self._start.keys() != progress.keys():
            self._start = dict(progress)
            return []
        steps = min(progress[rank].step - self._start[rank].step for rank in progress)
        if steps < self._policy.straggler_steps:
            return []
        own, total = {}, 0.0
        for rank, each in progress.items():
            spent = [after - before for after, before in zip(each.seconds, self._start[rank].seconds, strict=True)]
            total = max(total, sum(spent))
            own[rank] = sum(spent) - sum(spent[phase] for phase in _SHARED)
        self._start = dict(progress)
        median = statistics.median(own.values())
        slow = []
        for rank, seconds in own.items():
            score = (total - (seconds - median)) / total if total > 0 else 1.0
            self._slow[rank] = self._slow.get(rank, 0) + 1 if score < self._policy.straggler_score else 0
            if self._slow[rank] == self._policy.straggler_windows:
                share = f"{score:.0%} of their time"
                length = f"{self._slow[rank]} windows of {self._policy.straggler_steps} steps"
                text = f"Without the delay of process {rank}, steps would take {share}, for {length}."
                slow.append(Observation("straggler", FaultClass.STRAGGLER, Severity.WARNING, text, rank))
        return slow
