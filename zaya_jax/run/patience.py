"""When a run ends early: `evaluation.patience` evaluations without a new lowest held-out loss."""

import math
from pathlib import Path
from typing import NamedTuple

from zaya_jax.config import Config
from zaya_jax.config.stages import phase_steps, stage_at
from zaya_jax.run.checkpoints import saved_steps
from zaya_jax.run.manifest import try_read

PATIENCE = "patience"  # key of a checkpoint's metadata


class Patience(NamedTuple):
    """The lowest held-out loss of a phase, whose batches may differ from those of other phases."""

    phase: str = ""
    step: int = 0  # after which the loss was lowest
    lowest: float | None = None  # nats/token; None before the first evaluation
    since: int = 0  # evaluations since then

    def after(self, phase: str, step: int, loss: float) -> "Patience":
        """Return the record after an evaluation."""
        before = self if phase == self.phase else Patience(phase)
        if math.isfinite(loss) and (before.lowest is None or loss < before.lowest):
            return Patience(phase, step, loss)
        return before._replace(since=before.since + 1)

    def is_over(self, config: Config, step: int) -> bool:
        """Return whether the run must end after `step`, within a phase; never if `evaluation.patience` is 0."""
        is_within = config.phases[stage_at(config, step).phase].name == self.phase  # of the next step
        return is_within and 0 < config.evaluation.patience <= self.since


def can_act(config: Config) -> bool:
    """Return whether a phase has more evaluations within it than `evaluation.patience`, or that is 0."""
    every, patience = config.evaluation.every, config.evaluation.patience
    counts = ((end - 1) // every - begin // every for begin, end in phase_steps(config))
    return not patience or max(counts) > patience


def ended_early(checkpoints: Path, config: Config) -> bool:
    """Return whether the newest checkpoint of a run is that with which it ended early."""
    step = max(saved_steps(checkpoints), default=0)
    newest = try_read(checkpoints / str(step))
    return newest is not None and Patience(**newest.metadata.get(PATIENCE, {})).is_over(config, step)
