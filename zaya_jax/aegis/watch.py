"""Everything that is watched besides the processes themselves, in one place for the supervisor to ask."""

from collections.abc import Sequence

from zaya_jax.aegis.observation import Observation
from zaya_jax.aegis.policy import Policy
from zaya_jax.aegis.processes import Rank
from zaya_jax.aegis.training_watch import LossWatch, StragglerWatch


class Watch:
    """Watches the output of the processes, the training and the machine, for one attempt."""

    def __init__(self, policy: Policy) -> None:
        """Start to watch."""
        self._loss, self._straggler = LossWatch(policy.training), StragglerWatch(policy.training)

    @property
    def pids(self) -> list[int]:
        """Processes of the supervisor's own, which are not the trainer's."""
        return []

    def read_lines(self, lines: Sequence[tuple[Rank, bytes]]) -> list[Observation]:
        """Return what lines of the processes tell."""
        return []

    def poll(self, ranks: Sequence[Rank], now: float) -> list[Observation]:
        """Return what is new since the last call.

        Args:
          ranks: all processes of the attempt.
          now: of `time.monotonic`.
        """
        progress = {rank.index: each for rank in ranks if (each := rank.progress) is not None and each.first_step >= 0}
        seen: list[Observation | None] = []
        if 0 in progress:
            seen.append(self._loss.look(progress[0].step, progress[0].loss))
        if len(progress) == len(ranks) > 1:
            seen += self._straggler.look(progress)
        return [each for each in seen if each is not None]
