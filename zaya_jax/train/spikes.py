"""Steps that are passed over: a loss or gradient that is not finite, or far above those of the steps before."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from zaya_jax.config import SpikeConfig

REASONS = ("", "not finite", "loss spike", "gradient spike")  # by their number in the metrics

_FEWEST = 16  # steps to compare with (or the whole window, where that is shorter)
# Least deviations that count as one: without them, values that hardly move would make a spike of a ripple.
_LEAST_LOSS = 0.01  # of the median
_LEAST_LOG_NORM = 0.1


class Recent(NamedTuple):
    """What the last accepted steps of the phase had.

    Attributes:
      values: fp32 [2, window], loss (nats/token) and logarithm of the gradient norm; 0 where there is none yet.
      accepted: int32, accepted steps of the phase.
    """

    values: jax.Array
    accepted: jax.Array


def no_recent(config: SpikeConfig) -> Recent:
    """Before the first step."""
    kept = max(config.window, 1)  # a checkpoint holds no empty array
    return Recent(jnp.zeros((2, kept), jnp.float32), jnp.zeros((), jnp.int32))


def judge(config: SpikeConfig, recent: Recent, loss: jax.Array, norm: jax.Array) -> jax.Array:
    """Why a step is passed over, int32 index of `REASONS`; 0 where it counts.

    Args:
      config: window and threshold.
      recent: of the steps before.
      loss: fp32, nats/token.
      norm: fp32, of the gradient before clipping.
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    if not config.window:
        return jnp.where(finite, 0, 1)
    known = jnp.where(jnp.arange(config.window) < recent.accepted, recent.values, jnp.nan)
    median = jnp.nanmedian(known, axis=1)
    deviation = 1.4826 * jnp.nanmedian(jnp.abs(known - median[:, None]), axis=1)
    least = jnp.stack([_LEAST_LOSS * jnp.abs(median[0]), jnp.full_like(median[1], _LEAST_LOG_NORM)])
    limit = median + config.threshold * jnp.maximum(deviation, least)
    enough = recent.accepted >= min(_FEWEST, config.window)
    above = enough & (_values(loss, norm) > limit)
    return jnp.select([~finite, above[0], above[1]], [1, 2, 3], 0)


def remember(recent: Recent, loss: jax.Array, norm: jax.Array) -> Recent:
    """`recent` with an accepted step's values in place of the oldest."""
    values = recent.values.at[:, recent.accepted % recent.values.shape[1]].set(_values(loss, norm))
    return Recent(values, recent.accepted + 1)


def forget(recent: Recent, new_phase: jax.Array) -> Recent:
    """Nothing where a phase begins, whose data and rates are others."""
    return Recent(jnp.where(new_phase, 0.0, recent.values), jnp.where(new_phase, 0, recent.accepted))


def _values(loss: jax.Array, norm: jax.Array) -> jax.Array:
    return jnp.stack([loss, jnp.log(jnp.maximum(norm, 1e-30))]).astype(jnp.float32)
