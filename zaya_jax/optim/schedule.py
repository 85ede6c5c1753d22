"""The learning rate over a run, as a factor of its peak."""

import jax
import jax.numpy as jnp


def cosine_with_warmup(step: jax.Array, *, steps: int, warmup: int, final: float) -> jax.Array:
    """fp32 factor in (0, 1] of step `step` of `steps`, counted from 0.

    It rises linearly over `warmup` steps, then falls along half a cosine to `final` at the last step.
    """
    step = step.astype(jnp.float32)
    rising = (step + 1) / (warmup + 1)
    progress = jnp.clip((step - warmup) / max(steps - 1 - warmup, 1), 0.0, 1.0)
    falling = final + (1 - final) * 0.5 * (1 + jnp.cos(jnp.pi * progress))
    return jnp.where(step < warmup, rising, falling)
