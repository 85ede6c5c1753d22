"""Checkpoint retention."""

import math
from collections.abc import Collection

from zaya_jax.config import CheckpointConfig
from zaya_jax.run.checkpoints import Checkpoint


def steps_to_keep(
    checkpoints: Collection[Checkpoint], config: CheckpointConfig, verified: Collection[int] = ()
) -> set[int]:
    """Return the steps of the checkpoints to keep.

    Kept are the newest `config.keep`, multiples of `config.keep_every` steps, the `config.keep_best` with the lowest
    held-out loss, all pinned ones, and always the newest verified one (marked as verified, or its step is in
    `verified`).
    """
    steps = sorted(x.step for x in checkpoints)
    kept = set(steps[-config.keep :]) | {x.step for x in checkpoints if x.is_pinned}
    if config.keep_every is not None:
        kept |= {step for step in steps if step % config.keep_every == 0}
    if config.keep_best:
        evaluated = sorted((x.heldout_loss, -x.step) for x in checkpoints
                           if x.heldout_loss is not None and not math.isnan(x.heldout_loss))  # fmt: skip
        kept |= {-step for _, step in evaluated[: config.keep_best]}
    intact = sorted(x.step for x in checkpoints if x.is_verified or x.step in verified)
    return kept | set(intact[-1:])
