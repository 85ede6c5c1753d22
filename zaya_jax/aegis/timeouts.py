"""Limits for the stay of a process in a phase: learned from the longest stays, within the policy's limits."""

import contextlib
import json
from pathlib import Path

from zaya_jax.aegis.policy import TimeoutPolicy
from zaya_jax.errors import InputError
from zaya_jax.run.files import read_object, write_atomically
from zaya_jax.run.progress_record import Phase, Progress

_FILE = "timeouts.json"


class Timeouts:
    """The timeouts of the phases, kept in a file, so that a restarted supervisor need not learn them again."""

    def __init__(self, policy: TimeoutPolicy, folder: Path, command: str) -> None:
        """Read what was learned in `folder` from the same `command`, a digest."""
        self._policy, self._path, self._command = policy, folder / _FILE, command
        self._longest: dict[str, float] = {}
        with contextlib.suppress(InputError, KeyError, TypeError, ValueError):  # missing or damaged: learn again
            learned = read_object(self._path)
            if learned["command"] == command:
                self._longest = {
                    phase.name: float(learned["longest"][phase.name])
                    for phase in Phase
                    if phase.name in learned["longest"]
                }

    def limit(self, phase: Phase, progress: Progress | None) -> float:
        """Return the seconds that a process may stay in `phase`.

        Until it has done `learn_after` steps it may wait for other nodes, which compile: what was learned does not
        apply.
        """
        most = self._policy.of(phase)
        if phase.name not in self._longest or not self._has_trained(progress):
            return most
        return min(most, max(self._policy.floor, self._policy.factor * self._longest[phase.name]))

    def learn(self, progress: Progress) -> None:
        """Learn from the stays of a process that has trained for enough steps."""
        if not self._has_trained(progress):
            return
        for phase in (Phase.DATA, Phase.DISPATCH, Phase.DEVICE_WAIT, Phase.EVALUATE, Phase.SAVE):
            if progress.longest[phase] > self._longest.get(phase.name, 0.0):
                self._longest[phase.name] = progress.longest[phase]

    def _has_trained(self, progress: Progress | None) -> bool:
        if progress is None or progress.first_step < 0:
            return False
        return progress.step - progress.first_step >= self._policy.learn_after

    def save(self) -> None:
        """Write what was learned; a full disk is ignored."""
        with contextlib.suppress(OSError):
            write_atomically(self._path, json.dumps({"command": self._command, "longest": self._longest}) + "\n")
