"""Steps that are passed over: a loss or gradient that is not finite, or far above those of the steps before."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zaya_jax.config import SpikeConfig

REASONS = ("", "not finite", "loss spike", "gradient spike")  # by their number in the metrics

_FEWEST = 16  # steps to compare with (or the whole window, where that is shorter)
# Least deviations that count as one: without them, values that hardly move would make a spike of a ripple.
_LEAST_LOSS = 0.01  # of the median
_LEAST_LOG_NORM = 0.1
_NONE = -1.0  # no loss is below 0


class LossHistory(NamedTuple):
    """Loss (nats/token) and logarithm of the gradient norm of the last steps of the phase.

    Attributes:
      values: fp32 [2, window], of accepted steps; 0 where there is none yet.
      accepted: int32, accepted steps of the phase.
      skipped: fp32 [2, window], of the steps skipped in a row just now, the newest last; -1 where there is none, or
        where one was not finite. None in checkpoints of versions that did not keep it.
    """

    values: jax.Array
    accepted: jax.Array
    skipped: Any


def empty_history(config: SpikeConfig) -> LossHistory:
    """Before the first step."""
    kept = max(config.window, 1)  # a checkpoint holds no empty array
    return LossHistory(jnp.zeros((2, kept), jnp.float32), jnp.zeros((), jnp.int32), _no_skipped(kept))


def classify_step(config: SpikeConfig, history: LossHistory, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Why a step is passed over, int32 index of `REASONS`; 0 where it counts.

    Args:
      config: window and threshold.
      history: of the steps before.
      loss: fp32, nats/token.
      norm: fp32, of the gradient before clipping.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    if not config.window:
        return jnp.where(finite, 0, 1)
    steps = jnp.where(jnp.arange(config.window) < history.accepted, history.values, jnp.nan)
    enough = history.accepted >= min(_FEWEST, config.window)
    above = enough & (_values(loss, norm) > _limit(config, steps))
    return jnp.select([~finite, above[0], above[1]], [1, 2, 3], 0)


def append_step(history: LossHistory, loss: jax.Array, norm: jax.Array) -> LossHistory:
    """`history` with an accepted step's values in place of the oldest."""
    kept = history.values.shape[1]
    values = history.values.at[:, history.accepted % kept].set(_values(loss, norm))
    return LossHistory(values, history.accepted + 1, _no_skipped(kept))


def append_skipped(config: SpikeConfig, history: LossHistory, loss: jax.Array, norm: jax.Array) -> LossHistory:
    """`history` after a skipped step.

    Once `window` steps in a row were skipped, all of them finite and none a spike among them, the loss has settled at
    another level: they become the history that the next step is compared with.
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
    """Nothing where a phase begins, whose data and rates are others."""
    return LossHistory(
        jnp.where(new_phase, 0.0, history.values),
        jnp.where(new_phase, 0, history.accepted),
        jnp.where(new_phase, _NONE, history.skipped),
    )


def resize(config: SpikeConfig, history: LossHistory) -> LossHistory:
    """`history` of a checkpoint, where the window may have been another, with the newest steps that fit `config`."""
    before, kept = history.values.shape[1], max(config.window, 1)
    skipped = _no_skipped(before) if history.skipped is None else history.skipped
    if before == kept:
        return history._replace(skipped=skipped)
    oldest_first = jnp.roll(history.values, -(history.accepted % before), axis=1)  # empty places come first
    accepted = jnp.minimum(history.accepted, min(before, kept))
    values = jnp.roll(_last(oldest_first, kept, 0.0), accepted - kept, axis=1)
    values = jnp.where(jnp.arange(kept) < accepted, values, 0.0)
    return LossHistory(values, accepted, _last(skipped, kept, _NONE))


def _last(values: jax.Array, count: int, empty: float) -> jax.Array:
    missing = max(0, count - values.shape[1])
    return jnp.pad(values, ((0, 0), (missing, 0)), constant_values=empty)[:, -count:]


def _no_skipped(window: int) -> jax.Array:
    return jnp.full((2, window), _NONE, jnp.float32)


def _limit(config: SpikeConfig, steps: jax.Array) -> jax.Array:
    """Above which a loss and a log norm are spikes, fp32 [2], beside those of `steps` [2, n]; NaN is no step."""
    median = jnp.nanmedian(steps, axis=1)
    deviation = 1.4826 * jnp.nanmedian(jnp.abs(steps - median[:, None]), axis=1)
    floor = jnp.stack([_LEAST_LOSS * jnp.abs(median[0]), jnp.full_like(median[1], _LEAST_LOG_NORM)])
    return median + config.threshold * jnp.maximum(deviation, floor)


def _values(loss: jax.Array, norm: jax.Array) -> jax.Array:
    return jnp.stack([loss, jnp.log(jnp.maximum(norm, 1e-30))]).astype(jnp.float32)
