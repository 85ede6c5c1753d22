"""From roles to transforms: who is moved by what."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import optax

from zaya_jax.config import AdamWConfig, MuonConfig, OptimizerConfig
from zaya_jax.model.layers import MATRIX_ROLES, ROLES, Role
from zaya_jax.optim.muon import scale_by_muon
from zaya_jax.optim.skippable import SkippableTransform, skippable

DECAYED: tuple[Role, ...] = (*MATRIX_ROLES, "embedding", "convolution")


class Optimizer(NamedTuple):
    """An entry of `OPTIMIZERS`.

    Attributes:
      direction: (its settings, number of matrices side by side in a parameter by name) → the transform that gives
        directions, to be scaled by minus the learning rate.
      newton_schulz: whether it orthogonalizes whole matrices, which costs FLOPs, memory and an all-to-all.
    """

    direction: Callable[[Any, Mapping[str, int]], optax.GradientTransformation]
    newton_schulz: bool = False


def _muon(config: MuonConfig, fused: Mapping[str, int]) -> SkippableTransform:
    return scale_by_muon(config, fused if config.gate_up == "split" else {})


def _adamw(config: AdamWConfig, fused: Mapping[str, int]) -> SkippableTransform:
    del fused
    return skippable(optax.scale_by_adam(config.b1, config.b2, config.eps))


# The values of `optimizer.matrices`. The settings of each are the section of its name in `OptimizerConfig`.
OPTIMIZERS = {"muon": Optimizer(_muon, newton_schulz=True), "adamw": Optimizer(_adamw)}


def optimizer_settings(config: OptimizerConfig, name: str) -> Any:
    """The section of one of `OPTIMIZERS`, which has its `learning_rate` and `weight_decay` beside others."""
    return getattr(config, name)


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
    transforms: dict[Hashable, optax.GradientTransformation] = {role: _transform(config, role, fused) for role in ROLES}
    return SkippableTransform(*optax.partition(transforms, dict(roles)))


def _transform(config: OptimizerConfig, role: Role, fused: Mapping[str, int]) -> optax.GradientTransformation:
    optimizer = config.matrices if role in MATRIX_ROLES else "adamw"
    settings, own = optimizer_settings(config, optimizer), getattr(config.roles, role)
    decay = float(role in DECAYED) if own.weight_decay is None else own.weight_decay
    return optax.chain(
        OPTIMIZERS[optimizer].direction(settings, fused),
        optax.add_decayed_weights(settings.weight_decay * decay),
        optax.scale(-settings.learning_rate * own.learning_rate),
    )
