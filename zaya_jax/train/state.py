"""Everything a run is, between two steps."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zaya_jax.config import Config
from zaya_jax.model.layers import Role
from zaya_jax.model.tree import Arrays, balancing_biases, parameters, roles
from zaya_jax.model.zaya import Zaya
from zaya_jax.optim.build import make_balancer, make_optimizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State of training, a pytree.

    Attributes:
      params: fp32 masters by name; the loss moves them.
      balance: fp32 balancing biases by name; the load moves them.
      opt_state: of `params`.
      balance_state: of `balance`.
      step: int32, steps done, skipped ones included.
      skipped: int32, steps skipped in a row just now for a loss or gradient that is not finite.
      rng: key of whatever is drawn at random beside data and initialisation.
    """

    params: Arrays
    balance: Arrays
    opt_state: Any
    balance_state: Any
    step: jax.Array
    skipped: jax.Array
    rng: jax.Array


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """What is fixed over a run: the abstract model, the roles of its parameters, and the transforms."""

    model: Zaya
    roles: dict[str, Role]
    optimizer: optax.GradientTransformation
    balancer: optax.GradientTransformation


def make_blueprint(config: Config) -> Blueprint:
    """The blueprint of a configured run; nothing is allocated."""
    model = jax.eval_shape(functools.partial(Zaya, config.model), jax.random.key(0))
    model_roles = roles(model)
    optimizer = make_optimizer(config.optimizer, model_roles, config.train.compute_dtype)
    return Blueprint(model, model_roles, optimizer, make_balancer(config.optimizer.balance))


def init_state(config: Config, blueprint: Blueprint) -> TrainState:
    """The state before the first step, drawn from `config.seed`; traceable."""
    key_model, key_run = jax.random.split(jax.random.key(config.seed))
    model = Zaya(config.model, key_model)
    params, balance = parameters(model), balancing_biases(model)
    return TrainState(
        params=params,
        balance=balance,
        opt_state=blueprint.optimizer.init(params),
        balance_state=blueprint.balancer.init(balance),
        step=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        rng=key_run,
    )
