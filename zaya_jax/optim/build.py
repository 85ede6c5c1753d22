"""Build the optimizer: one transform for each parameter role."""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import optax

from zaya_jax.config import AdamWConfig, MuonConfig, OptimizerConfig
from zaya_jax.model.layers import MATRIX_ROLES, ROLES, Role, Roles
from zaya_jax.optim.muon import scale_by_muon
from zaya_jax.optim.skippable import SkippableTransform, skippable

DECAYED: tuple[Role, ...] = (*MATRIX_ROLES, "embedding", "convolution")


class Optimizer(NamedTuple):
    """An entry of `OPTIMIZERS`."""

    # (settings, number of matrices side by side in a parameter, by name) → a transform whose updates are directions, to
    # be multiplied by minus the learning rate
    direction: Callable[[Any, Mapping[str, int]], optax.GradientTransformation]
    newton_schulz: bool = False  # whether it orthogonalizes whole matrices, which costs FLOPs, memory and an all-to-all


def _muon(config: MuonConfig, fused: Mapping[str, int]) -> SkippableTransform:
    return scale_by_muon(config, fused if config.gate_up == "split" else {})


def _adamw(config: AdamWConfig, fused: Mapping[str, int]) -> SkippableTransform:
    del fused
    return skippable(optax.scale_by_adam(config.b1, config.b2, config.eps))


# By value of `optimizer.matrices`. Its settings are the section of the same name in `OptimizerConfig`.
OPTIMIZERS = {"muon": Optimizer(_muon, newton_schulz=True), "adamw": Optimizer(_adamw)}


def make_optimizer(config: OptimizerConfig, roles: Roles, fused: Mapping[str, int]) -> SkippableTransform:
    """Make the transform of all trained parameters, with one optimizer for each role.

    `roles` and `fused` are those of `model.tree`. The transform is of flat dicts by name. Its updates are at the peak
    learning rate and include weight decay, w ← (1 − ηδ)w, which Muon's scaling does not change; the caller multiplies
    them by the schedule's factor. Its init raises ValueError if the parameters are not those of `roles`.
    """
    transforms: dict[Hashable, optax.GradientTransformation] = {role: _transform(config, role, fused) for role in ROLES}
    return SkippableTransform(*optax.partition(transforms, dict(roles)))


def _transform(config: OptimizerConfig, role: Role, fused: Mapping[str, int]) -> optax.GradientTransformation:
    optimizer = config.matrices if role in MATRIX_ROLES else "adamw"
    settings, own = getattr(config, optimizer), getattr(config.roles, role)
    decay = float(role in DECAYED) if own.weight_decay is None else own.weight_decay
    decayed, rate = settings.weight_decay * decay, -settings.learning_rate * own.learning_rate
    direction = OPTIMIZERS[optimizer].direction(settings, fused)
    return optax.chain(direction, optax.add_decayed_weights(decayed), optax.scale(rate))
