"""Update the balancing biases from the expert load, not from the loss (docs/reference.md §3.3)."""

import jax
import jax.numpy as jnp
import optax

from zaya_jax.config import BalanceConfig


def make_balancer(config: BalanceConfig) -> optax.GradientTransformation:
    """Make the transform that updates the balancing biases; its gradients are `load_error`.

    The rule is AdamW without decay (ZAYA1), a fixed step against the sign of the error (DeepSeek-V3,
    arXiv 2408.15664) or none. An error that is always 0, as for skip, gives an update of 0.
    """
    match config.rule:
        case "adamw":
            return optax.adam(config.learning_rate, config.b1, config.b2, config.eps)
        case "sign":
            return optax.chain(optax.scale_by_sign(), optax.scale(-config.learning_rate))
        case "none":
            return optax.set_to_zero()


def load_error(counts_le: jax.Array) -> jax.Array:
    """Compute the pseudo-gradient of the balancing biases: each expert's share of the load minus 1 / e.

    `counts_le`, int32 [l, e + 1], are the tokens of the whole step for each expert, skip last. The result, fp32 [l, e +
    1], is 0 for skip, whose bias stays fixed, and for a layer without tokens.
    """
    real = counts_le[:, :-1]
    total, experts = real.sum(-1, keepdims=True), real.shape[-1]
    # Integers up to the division: an even load must give exactly 0, since the sign of a rounding error moves a bias.
    above = (real - total // experts).astype(jnp.float32) - (total % experts).astype(jnp.float32) / experts
    return jnp.pad(above / jnp.maximum(total, 1).astype(jnp.float32), ((0, 0), (0, 1)))
