"""Generations of a run: processes that were given up for dead, and still live, cannot save over their successors.

Who goes on with a run takes the next generation and notes which checkpoints there were. A checkpoint counts only
where it is of the newest generation, or was there when a newer one began.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from zaya_jax.checkpoint.digest import digest
from zaya_jax.run.files import read_json, write_atomically

_FILE = "GENERATION"
_LEAP = 1000  # more generations than save nothing in a row


class Fence(NamedTuple):
    """The newest generation in a folder of checkpoints, and that of each checkpoint it began with, by step."""

    generation: int
    accepted: Mapping[int, int]

    def lets_pass(self, step: int, generation: int) -> bool:
        """Whether a checkpoint counts."""
        return generation == self.generation or self.accepted.get(step) == generation


def read_fence(folder: Path) -> Fence | None:
    """The newest generation; None where none was taken, as in a copy of checkpoints, or it cannot be read."""
    try:
        tree = read_json(folder / _FILE)
        if digest(_text(tree["generation"], tree["accepted"]).encode()) != tree["digest"]:
            return None
        fence = Fence(tree["generation"], {int(step): one for step, one in tree["accepted"].items()})
        return fence if all(type(one) is int for one in (fence.generation, *fence.accepted.values())) else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def take_fence(folder: Path, generations: Mapping[int, int]) -> Fence:
    """Begin the next generation with the checkpoints there are, whose `generations` are given by step."""
    before = read_fence(folder)
    newest = max(generations.values(), default=0)
    # Generations that have saved nothing yet are known by the file alone: where it is gone, they are leapt over.
    last = max(before.generation, newest) if before else newest + _LEAP * bool(generations)
    fence = Fence(last + 1, dict(generations))
    text = _text(fence.generation, {str(step): one for step, one in fence.accepted.items()})
    write_atomically(folder / _FILE, json.dumps(json.loads(text) | {"digest": digest(text.encode())}) + "\n")
    return fence


def superseded_by(folder: Path, generation: int) -> str:
    """What stands against a generation writing to a folder: others that have gone on with the run since."""
    fence = read_fence(folder)
    if fence is None:
        return f"It is not to be read in {folder} which processes may save there: start the run again."
    if fence.generation != generation:
        return (f"Other processes have gone on with this run since: its generation is {fence.generation}, and here it "
                f"is {generation}.")  # fmt: skip
    return ""


def _text(generation: int, accepted: Mapping[str, int]) -> str:
    return json.dumps({"generation": generation, "accepted": accepted})
