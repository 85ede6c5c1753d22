"""Which checkpoints are kept."""

import math
from collections.abc import Collection
from typing import NamedTuple

from zaya_jax.config import CheckpointConfig


class Saved(NamedTuple):
    """What retention knows of a checkpoint."""

    step: int
    heldout_loss: float | None = None  # nats/token, where it was looked at
    pinned: bool = False
    verified: bool = False  # read, and found whole


def steps_to_keep(saved: Collection[Saved], config: CheckpointConfig, verified: Collection[int] = ()) -> set[int]:
    """The steps of the checkpoints that stay.

    They are the newest `config.keep`, those of each `config.keep_every` steps, the `config.keep_best` of lowest
    held-out loss, the pinned ones, and the newest of `verified`, those that were read and found whole: whatever else
    is removed, that one never is.
    """
    steps = sorted(one.step for one in saved)
    kept = set(steps[-config.keep :]) | {one.step for one in saved if one.pinned}
    if config.keep_every is not None:
        kept |= {step for step in steps if step % config.keep_every == 0}
    if config.keep_best:
        looked = sorted((one.heldout_loss, -one.step) for one in saved
                        if one.heldout_loss is not None and not math.isnan(one.heldout_loss))  # fmt: skip
        kept |= {-step for _, step in looked[: config.keep_best]}
    found = sorted(one.step for one in saved if one.verified or one.step in verified)
    return kept | set(found[-1:])
