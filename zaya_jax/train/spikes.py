"""Decide which steps to skip: those with a loss or gradient norm that is not finite, or that is a spike."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zaya_jax.config import SpikeConfig

REASONS = ("", "not finite", "loss spike", "gradient spike")  # indexed by the metric `skip`

_FEWEST = 16  # accepted steps before spikes are detected (or the whole window, if it is shorter)
# Lower bounds of the deviation. Without them, a tiny change after a flat stretch would count as a spike.
_LEAST_LOSS = 0.01  # relative to the median
_LEAST_LOG_NORM = 0.1
_NONE = -1.0  # marks an empty place; a loss is never negative


class LossHistory(NamedTuple):
    """Loss (nats/token, row 0) and log gradient norm (row 1) of the last steps of the phase."""

    values: jax.Array  # fp32 [2, window], a ring buffer of accepted steps; 0 where empty
    accepted: jax.Array  # int32, number of accepted steps in the phase
    # fp32 [2, window], the current run of skipped steps, newest last; -1 where empty or not finite. None in
    # checkpoints of versions that did not save it.
    skipped: Any


def empty_history(config: SpikeConfig) -> LossHistory:
    """Return the history before the first step."""
    kept = max(config.window, 1)  # checkpoints do not support empty arrays
    return LossHistory(jnp.zeros((2, kept), jnp.float32), jnp.zeros((), jnp.int32), _no_skipped(kept))


def classify_step(config: SpikeConfig, history: LossHistory, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Return why to skip a step with this loss (fp32, nats/token) and gradient norm (fp32, before clipping).

    The result is an int32 index of `REASONS`; 0 to accept the step.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    if not config.window:
        return jnp.where(finite, 0, 1)
    steps = jnp.where(jnp.arange(config.window) < history.accepted, history.values, jnp.nan)
    enough = history.accepted >= min(_FEWEST, config.window)
    above = enough & (_values(loss, norm) > _limit(config, steps))
    return jnp.select([~finite, above[0], above[1]], [1, 2, 3], 0)


def append_step(history: LossHistory, loss: jax.Array, norm: jax.Array) -> LossHistory:
    """Return `history` with an accepted step in place of the oldest."""
    kept = history.values.shape[1]
    values = history.values.at[:, history.accepted % kept].set(_values(loss, norm))
    return LossHistory(values, history.accepted + 1, _no_skipped(kept))


def append_skipped(config: SpikeConfig, history: LossHistory, loss: jax.Array, norm: jax.Array) -> LossHistory:
    """Return `history` after a skipped step.

    If the last `window` steps were all skipped, all are finite and none is a spike among the others, the loss has
    settled at a new level: these steps become the history that the next step is compared with.
    """
    newest = _values(loss, norm)
    newest = jnp.where(jnp.isfinite(newest).all(), newest, _NONE)
    skipped = jnp.concatenate([history.skipped[:, 1:], newest[:, None]], axis=1)
    if not config.window:
        return history._replace(skipped=skipped)
    consistent = (skipped <= _limit(config, skipped)[:, None]).all() & (skipped[0] != _NONE).all()
    return LossHistory(
        jnp.where(consistent, skipped, history.values),
        jnp.where(consistent, config.window, history.accepted),
        jnp.where(consistent, _no_skipped(config.window), skipped),
    )


def reset_history(history: LossHistory, new_phase: jax.Array) -> LossHistory:
    """Return an empty history if `new_phase` is true, since data and learning rates change; else `history`."""
    return LossHistory(
        jnp.where(new_phase, 0.0, history.values),
        jnp.where(new_phase, 0, history.accepted),
        jnp.where(new_phase, _NONE, history.skipped),
    )


def _no_skipped(window: int) -> jax.Array:
    return jnp.full((2, window), _NONE, jnp.float32)


def _limit(config: SpikeConfig, steps: jax.Array) -> jax.Array:
    """Return the limits of loss and log norm, fp32 [2], above which they are spikes.

    Median plus `threshold` times the deviation of `steps` [2, n], where NaN marks an empty place.
    """
    median = jnp.nanmedian(steps, axis=1)
    deviation = 1.4826 * jnp.nanmedian(jnp.abs(steps - median[:, None]), axis=1)
    floor = jnp.stack([_LEAST_LOSS * jnp.abs(median[0]), jnp.full_like(median[1], _LEAST_LOG_NORM)])
    return median + config.threshold * jnp.maximum(deviation, floor)


def _values(loss: jax.Array, norm: jax.Array) -> jax.Array:
    return jnp.stack([loss, jnp.log(jnp.maximum(norm, 1e-30))]).astype(jnp.float32)
