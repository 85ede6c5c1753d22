"""What moves the balancing biases: the load, never the loss (zaya1.md §3.3)."""

import jax
import jax.numpy as jnp
import optax

from zaya_jax.config import BalanceConfig


def make_balancer(config: BalanceConfig) -> optax.GradientTransformation:
    """The transform of the balancing biases, fed with `load_error`.

    Its rule is AdamW without decay (ZAYA1), a step of fixed size against the error's sign (DeepSeek-V3,
    arXiv 2408.15664) or none. Where the error is always 0, as it is for skip, the update is 0.
    """
    match config.rule:
        case "adamw":
            return optax.adam(config.learning_rate, config.b1, config.b2, config.eps)
        case "sign":
            return optax.chain(optax.scale_by_sign(), optax.scale(-config.learning_rate))
        case "none":
            return optax.set_to_zero()


def load_error(counts_le: jax.Array) -> jax.Array:
    """The pseudo-gradient of the balancing biases: each real expert's part of the load less 1 / e.

    Args:
      counts_le: tokens of the whole step, [l, e + 1] with skip last.

    Returns:
      fp32 [l, e + 1], 0 for skip, whose bias so stays where it is, and for a layer that had no tokens.
    """
    real = counts_le[:, :-1]
    total, experts = real.sum(-1, keepdims=True), real.shape[-1]
    # Whole numbers up to the division: a fair load gives 0 and not a rounding error, whose sign would move a bias.
    above = (real - total // experts).astype(jnp.float32) - (total % experts).astype(jnp.float32) / experts
    return jnp.pad(above / jnp.maximum(total, 1).astype(jnp.float32), ((0, 0), (0, 1)))
