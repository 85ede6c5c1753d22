"""The learning rate of each step, as a factor of the optimizer's rates: a function of tokens, not of steps."""

import math
from collections.abc import Callable
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import Config
from zaya_jax.config.phases import ScheduleShape
from zaya_jax.config.stages import schedule_spans, stages

_SHAPES: tuple[ScheduleShape, ...] = get_args(ScheduleShape)


def learning_rate_factor(config: Config) -> Callable[[jax.Array], jax.Array]:
    """The function from a step of the run, int32 [] counted from 0, to its factor, fp32 [], above 0.

    The factor is that of the token the step ends with, so that a warm-up begins above 0 and the last step of
    a span has the schedule's `final`. Two runs whose batches differ have the same factor after as many tokens.
    """
    rows = []
    for stage in stages(config):
        schedule, begun, span = schedule_spans(config)[stage.phase]
        rows.append({
            "first_step": stage.first_step,
            "before": stage.first_token - begun,  # tokens of the span before the stage
            "step": stage.tokens,
            "warmup": schedule.warmup_tokens,
            "falling": max(span - schedule.warmup_tokens, 1),
            "left": span,
            "decay": schedule.decay_tokens or 1,
            "peak": schedule.peak,
            "final": schedule.final,
            "shape": _SHAPES.index(schedule.shape),
        })  # fmt: skip
    tables = {name: np.array([row[name] for row in rows], np.float32) for name in rows[0]}
    firsts = np.array([row["first_step"] for row in rows], np.int32)
    shapes = np.array([row["shape"] for row in rows], np.int32)

    def factor(step: jax.Array) -> jax.Array:
        stage = jnp.searchsorted(firsts, step, side="right") - 1
        of = {name: jnp.asarray(table)[stage] for name, table in tables.items()}
        steps = (step - jnp.asarray(firsts)[stage] + 1).astype(jnp.float32)
        token = of["before"] + steps * of["step"]
        progress = jnp.clip((token - of["warmup"]) / of["falling"], 0.0, 1.0)
        decaying = jnp.clip((of["left"] - token) / of["decay"], 0.0, 1.0)  # 1 until the decay begins
        above = {  # the part of the way from the final factor up to the peak
            "constant": jnp.ones_like(token),
            "cosine": 0.5 * (1 + jnp.cos(math.pi * progress)),
            "linear": 1 - progress,
            "wsd": decaying,
        }
        part = jnp.stack([above[shape] for shape in _SHAPES])[jnp.asarray(shapes)[stage]]
        falling = of["final"] + (of["peak"] - of["final"]) * part
        rising = of["peak"] * token / jnp.maximum(of["warmup"], 1.0)
        return jnp.where(token < of["warmup"], rising, falling)

    return factor
