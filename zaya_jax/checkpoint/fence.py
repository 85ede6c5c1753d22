"""Generations of a run: processes that were given up for dead, and still live, cannot save over their successors.

Who goes on with a run takes the next generation and notes which checkpoints there were. A checkpoint counts only
where it is of the newest generation, or was there when a newer one began.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from zaya_jax.errors import InputError
from zaya_jax.files import write_atomically

_FILE = "GENERATION"


class Fence(NamedTuple):
    """The newest generation in a folder of checkpoints, and that of each checkpoint it began with, by step."""

    generation: int
    accepted: Mapping[int, int]

    def lets_pass(self, step: int, generation: int) -> bool:
        """Whether a checkpoint counts."""
        return generation == self.generation or self.accepted.get(step) == generation


def read_fence(folder: Path) -> Fence | None:
    """The newest generation; None where no process has taken one, as in a copy of checkpoints alone.

    Raises:
      InputError: the file that says it cannot be read.
    """
    path = folder / _FILE
    if not path.exists():
        return None
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return Fence(int(tree["generation"]), {int(step): int(one) for step, one in tree["accepted"].items()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{path} cannot be read, so it is not known which processes may save there. Where no other "
                         "process trains in that run, delete it.") from error  # fmt: skip


def take_fence(folder: Path, generations: Mapping[int, int]) -> Fence:
    """Begin the next generation with the checkpoints there are, whose `generations` are given by step."""
    before = read_fence(folder)
    fence = Fence(1 + max([0 if before is None else before.generation, *generations.values()]), dict(generations))
    write_atomically(folder / _FILE, json.dumps({"generation": fence.generation, "accepted": fence.accepted}) + "\n")
    return fence
