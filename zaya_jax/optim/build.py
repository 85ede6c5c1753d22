"""From roles to transforms: who is moved by what."""

from collections.abc import Hashable, Mapping

import jax
import jax.numpy as jnp
import optax

from zaya_jax.config import BalanceConfig, OptimizerConfig
from zaya_jax.model.layers import MATRIX_ROLES, Role
from zaya_jax.optim.muon import scale_by_muon

DECAYED_BY_ADAMW = ("embedding", "convolution")


def group_of(role: Role) -> str:
    """'muon', 'adamw', or 'adamw_no_decay' for norms, scales, temperatures and biases."""
    if role in MATRIX_ROLES:
        return "muon"
    return "adamw" if role in DECAYED_BY_ADAMW else "adamw_no_decay"


def make_optimizer(
    config: OptimizerConfig, roles: Mapping[str, Role], dtype: jax.typing.DTypeLike
) -> optax.GradientTransformation:
    """The transform of all trained parameters.

    Args:
      config: rates and decays.
      roles: of every parameter, by name.
      dtype: of Muon's Newton–Schulz iterates.

    Returns:
      A transform of flat dicts by name. Updates are at the peak learning rate, decay included; the caller
      multiplies them by the schedule's factor.
    """
    muon, adamw = config.muon, config.adamw
    adam = optax.scale_by_adam(adamw.b1, adamw.b2, adamw.eps)
    transforms: dict[Hashable, optax.GradientTransformation] = {
        "muon": optax.chain(
            scale_by_muon(muon.momentum, nesterov=muon.nesterov, steps=muon.newton_schulz_steps, dtype=dtype),
            optax.add_decayed_weights(muon.weight_decay),
            optax.scale(-muon.learning_rate),
        ),
        "adamw": optax.chain(adam, optax.add_decayed_weights(adamw.weight_decay), optax.scale(-adamw.learning_rate)),
        "adamw_no_decay": optax.chain(adam, optax.scale(-adamw.learning_rate)),
    }
    return optax.partition(transforms, {name: group_of(role) for name, role in roles.items()})


def make_balancer(config: BalanceConfig) -> optax.GradientTransformation:
    """The transform of the balancing biases, fed with `load_error` (zaya1.md §3.3)."""
    return optax.adam(config.learning_rate, config.b1, config.b2, config.eps)


def load_error(counts_le: jax.Array) -> jax.Array:
    """The pseudo-gradient of the balancing biases: each real expert's part of the load less 1 / e.

    Args:
      counts_le: tokens of the whole step, [l, e + 1] with skip last.

    Returns:
      fp32 [l, e + 1], 0 for skip, whose bias so stays where it is.
    """
    real = counts_le[:, :-1].astype(jnp.float32)
    total = real.sum(-1, keepdims=True)
    error = jnp.where(total > 0, real / jnp.maximum(total, 1.0) - 1 / real.shape[-1], 0.0)
    return jnp.pad(error, ((0, 0), (0, 1)))
