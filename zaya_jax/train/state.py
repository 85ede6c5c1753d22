"""The training state: everything that changes from step to step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.config import Config
from zaya_jax.config.stages import first_step
from zaya_jax.model.lora import draw_adapters
from zaya_jax.model.tree import Arrays, balancing_biases, parameters
from zaya_jax.model.zaya import Zaya
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.train.spec import PhaseSpec
from zaya_jax.train.spikes import LossHistory, empty_history


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """The training state, a pytree."""

    params: Arrays  # fp32 master weights by name, of all parameters or of the adapters only
    balance: Arrays  # fp32 balancing biases by name, updated from the expert load instead of the loss
    opt_state: Any  # optimizer state of `params`
    balance_state: Any  # optimizer state of `balance`
    step: jax.Array  # int32, number of steps done, skipped ones included
    skipped: jax.Array  # int32, number of steps skipped in a row up to now
    recent: LossHistory  # loss and gradient norm of recent steps, to detect spikes
    rng: jax.Array  # random key for everything other than data and initialization


def init_state(program: PhaseSpec) -> TrainState:
    """Draw the state before the first step from `seed`; traceable."""
    config = program.config
    key = jax.random.split(jax.random.key(config.seed))[0]
    model, dtype = Zaya(config.model, key), accumulation_dtype(config.train.compute_dtype)
    drawn = parameters(model) if config.lora is None else draw_adapters(key, program.trained, dtype)
    params, balance = ({name: x.astype(dtype) for name, x in kind.items()} for kind in (drawn, balancing_biases(model)))
    return TrainState(
        params=params,
        balance=balance,
        opt_state=program.optimizer.init(params),
        balance_state=program.balancer.init(balance),
        **init_counters(config),
    )


def init_counters(config: Config) -> dict[str, Any]:
    """Return the fields of the initial state that are not learned, by name; traceable."""
    return {
        "step": jnp.asarray(first_step(config), jnp.int32),
        "skipped": jnp.zeros((), jnp.int32),
        "recent": empty_history(config.train.spike),
        "rng": jax.random.split(jax.random.key(config.seed))[1],
    }
