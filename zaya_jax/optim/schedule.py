"""The learning-rate schedule: a factor of the optimizer's peak rates, as a function of tokens, not of steps."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import Config
from zaya_jax.config.phases import ScheduleShape
from zaya_jax.config.stages import schedule_spans, stages

# The remaining fraction of the decay → the fraction of the way from the final factor to the peak.
_SHAPES: dict[ScheduleShape, Callable[[jax.Array], jax.Array]] = {
    "constant": jnp.ones_like,
    "cosine": lambda remaining: jnp.sin(0.5 * math.pi * remaining) ** 2,
    "linear": lambda remaining: remaining,
    "wsd": lambda remaining: remaining,
}


def learning_rate_factor(config: Config) -> Callable[[jax.Array], jax.Array]:
    """Make the function from a step, int32 [] counted from 0, to its learning-rate factor, fp32 [].

    The factor is taken at the last token of the step, so that a warm-up starts above 0 and the last step of a span has
    the schedule's `final`. Runs with different batch sizes have the same factor after the same number of tokens.
    Tokens done are counted from the start of the span and tokens left from its end, so that fp32 is exact where either
    is small, however long the span.
    """
    rows, shapes = [], []
    for stage in stages(config):
        schedule, span_start, span = schedule_spans(config)[stage.phase]
        shapes.append(list(_SHAPES).index(schedule.shape))
        row = {
            "before": stage.first_token - span_start,  # tokens of the span before the stage
            "after": span_start + span - stage.first_token - stage.steps * stage.tokens,  # tokens after the stage
            "step": stage.tokens,
            "warmup": schedule.warmup_tokens,
            "falling": schedule.decay_tokens or max(span - schedule.warmup_tokens, 1),
            "peak": schedule.peak,
            "final": schedule.peak if schedule.shape == "constant" else schedule.final,
        }
        rows.append(row)
    tables = {name: np.array([row[name] for row in rows], np.float32) for name in rows[0]}
    firsts, ends = np.array([(stage.first_step, stage.end) for stage in stages(config)], np.int32).T

    def factor(step: jax.Array) -> jax.Array:
        stage = jnp.searchsorted(firsts, step, side="right") - 1
        values = {name: jnp.asarray(table)[stage] for name, table in tables.items()}
        steps_done = (step - jnp.asarray(firsts)[stage] + 1).astype(jnp.float32)
        steps_left = (jnp.asarray(ends)[stage] - step - 1).astype(jnp.float32)
        token = values["before"] + steps_done * values["step"]
        # 1 until the decay starts
        remaining = jnp.clip((values["after"] + steps_left * values["step"]) / values["falling"], 0.0, 1.0)
        part = jnp.stack([shape(remaining) for shape in _SHAPES.values()])[jnp.asarray(shapes, jnp.int32)[stage]]
        falling = values["final"] + (values["peak"] - values["final"]) * part
        rising = values["peak"] * token / jnp.maximum(values["warmup"], 1.0)
        return jnp.where(token <= values["warmup"], rising, falling)

    return factor
