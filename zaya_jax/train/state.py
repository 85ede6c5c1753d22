"""Everything a run is, between two steps."""

import dataclasses
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from zaya_jax.config import Config
from zaya_jax.config.stages import first_step
from zaya_jax.model.lora import draw_adapters
from zaya_jax.model.tree import Arrays, balancing_biases, parameters
from zaya_jax.model.zaya import Zaya
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.train.spikes import LossHistory, empty_history

if TYPE_CHECKING:
    from zaya_jax.train.program import PhaseProgram


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """State of training, a pytree.

    Attributes:
      params: fp32 master weights by name, of all parameters or of adapters alone; the loss moves them.
      balance: fp32 balancing biases by name; the load moves them.
      opt_state: of `params`.
      balance_state: of `balance`.
      step: int32, steps done, skipped ones included.
      skipped: int32, steps skipped in a row just now.
      recent: what the last steps that were not skipped had, to tell a spike by.
      rng: key of whatever is drawn at random beside data and initialisation.
    """

    params: Arrays
    balance: Arrays
    opt_state: Any
    balance_state: Any
    step: jax.Array
    skipped: jax.Array
    recent: LossHistory
    rng: jax.Array


def init_state(program: "PhaseProgram") -> TrainState:
    """The state before the first step, drawn from `seed`; traceable."""
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
    """What of the state is not learned, before the first step; traceable."""
    return {
        "step": jnp.asarray(first_step(config), jnp.int32),
        "skipped": jnp.zeros((), jnp.int32),
        "recent": empty_history(config.train.spike),
        "rng": jax.random.split(jax.random.key(config.seed))[1],
    }
