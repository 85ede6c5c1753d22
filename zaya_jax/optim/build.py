"""From roles to transforms: who is moved by what."""

from collections.abc import Hashable, Mapping

import optax

from zaya_jax.config import OptimizerConfig
from zaya_jax.model.layers import MATRIX_ROLES, ROLES, Role
from zaya_jax.optim.muon import scale_by_muon
from zaya_jax.optim.skippable import SkippableTransform, skippable

DECAYED: tuple[Role, ...] = (*MATRIX_ROLES, "embedding", "convolution")


def make_optimizer(config: OptimizerConfig, roles: Mapping[str, Role], fused: Mapping[str, int]) -> SkippableTransform:
    """The transform of all trained parameters, one for each role.

    Args:
      config: what moves matrices, and each role's part of the rates and decays.
      roles: of every parameter, by name (`tree.roles`).
      fused: number of matrices that stand side by side in a parameter, by name (`tree.fused`).

    Returns:
      A transform of flat dicts by name. Updates are at the peak learning rate, decay included (that of a
      role at w ← (1 − ηδ)w, whatever Muon's scaling); the caller multiplies them by the schedule's factor.
      Its init raises ValueError for parameters that are not those of `roles`.
    """
    split = fused if config.muon.gate_up == "split" else {}
    transforms: dict[Hashable, optax.GradientTransformation] = {role: _transform(config, role, split) for role in ROLES}
    return SkippableTransform(*optax.partition(transforms, dict(roles)))


def _transform(config: OptimizerConfig, role: Role, split: Mapping[str, int]) -> optax.GradientTransformation:
    if role in MATRIX_ROLES and config.matrices == "muon":
        section, direction = config.muon, scale_by_muon(config.muon, split)
    else:
        section = config.adamw
        direction = skippable(optax.scale_by_adam(section.b1, section.b2, section.eps))
    own = getattr(config.roles, role)
    decay = float(role in DECAYED) if own.weight_decay is None else own.weight_decay
    return optax.chain(
        direction,
        optax.add_decayed_weights(section.weight_decay * decay),
        optax.scale(-section.learning_rate * own.learning_rate),
    )
