"""Watch the training itself: losses that are not finite or stay high, and a process that is slower than the others."""

import math
import statistics
from collections import deque
from collections.abc import Mapping

from zaya_jax.aegis.observation import FaultClass, Observation, Severity
from zaya_jax.aegis.policy import TrainingPolicy
from zaya_jax.run.progress_record import Phase, Progress

_LEAST_STEPS = 16  # steps before losses are compared
_LEAST_DEVIATION = 0.01  # of the loss, relative to the median
# Phases in which a process may wait for others; the rest is its own time.
_SHARED = (Phase.DISPATCH, Phase.DEVICE_WAIT)


class LossWatch:
    """Compares each loss with the median of the steps before; the trainer skips single spikes, this sees lasting ones.

    A loss is high if it exceeds the median of the last `spike_window` normal ones by more than `spike_threshold` robust
    standard deviations (1.4826 × the median absolute deviation).
    """

    def __init__(self, policy: TrainingPolicy) -> None:
        """Start without a step."""
        self._policy = policy
        self._losses = deque[float](maxlen=policy.spike_window)
        self._step, self._good, self._high, self._not_finite = -1, 0, 0, 0

    def look(self, step: int, loss: float, first_step: int = 0) -> Observation | None:
        """Look at the loss after `step` steps; return an observation when it has been bad for `spike_steps` steps.

        Args:
          step: number of steps done.
          loss: of the last one, in nats/token.
          first_step: number of steps that were done when training started or resumed.
        """
        self._good = max(self._good, first_step)
        if step == self._step or (math.isnan(loss) and self._step < 0):
            return None
        self._step = step
        if not math.isfinite(loss):
            self._not_finite += 1
            if self._not_finite == self._policy.spike_steps:
                text = f"The loss has not been finite for {self._not_finite} steps, until step {step}."
                return Observation("loss-not-finite", FaultClass.NON_FINITE, Severity.ERROR, text, None, self._good)
            return None
        self._not_finite = 0
        if len(self._losses) >= _LEAST_STEPS and loss > self._limit():
            self._high += 1
            if self._high == self._policy.spike_steps:
                return Observation(
                    "loss-spike", FaultClass.SPIKE, Severity.ERROR,
                    f"The loss has been high for {self._high} steps, until step {step}: {loss:.4g} after a median of "
                    f"{statistics.median(self._losses):.4g} nats/token.", None, self._good,
                )  # fmt: skip
            return None
        self._high, self._good = 0, step
        self._losses.append(loss)
        return None

    def _limit(self) -> float:
        median = statistics.median(self._losses)
        deviation = 1.4826 * statistics.median(abs(loss - median) for loss in self._losses)
        return median + self._policy.spike_threshold * max(deviation, _LEAST_DEVIATION * abs(median))


class StragglerWatch:
    """Compares the time that each process spends by itself, not waiting for others, over windows of steps.

    The score of a process is the time that a window would take without its excess over the median, relative to the
    time that it took. It sees a slow host or slow data; a GPU that computes slowly looks the same from all processes.
    """

    def __init__(self, policy: TrainingPolicy) -> None:
        """Start without a window."""
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
                slow.append(Observation(
                    "straggler", FaultClass.STRAGGLER, Severity.WARNING,
                    f"Without the delay of process {rank}, steps would take {score:.0%} of their time, for "
                    f"{self._slow[rank]} windows of {self._policy.straggler_steps} steps.", rank,
                ))  # fmt: skip
        return slow
