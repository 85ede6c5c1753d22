"""The training state, everything that changes from step to step, and what is fixed during a phase."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from zaya_jax.config import Config
from zaya_jax.config.checks import counted
from zaya_jax.config.phases import Remat
from zaya_jax.config.stages import BatchStage, first_step, micro_batch
from zaya_jax.errors import InputError
from zaya_jax.model.layers import Role
from zaya_jax.model.lora import draw_adapters
from zaya_jax.model.tree import Arrays, balancing_biases, parameters
from zaya_jax.model.zaya import Zaya
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.parallel.mesh import batch_shards
from zaya_jax.parallel.placement import Placement
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


@dataclasses.dataclass(frozen=True, eq=False)
class PhaseSpec:
    """Everything that is fixed during a phase: model, placement, optimizer."""

    config: Config  # configuration of the run
    placement: Placement  # mesh, shardings and operations
    model: Zaya  # abstract model, with the RoPE settings of the phase
    remat: Remat  # rematerialization policy of the backward pass
    roles: dict[str, Role]  # role of each parameter, adapters included, by name
    # Shape of each parameter that the optimizer updates, by name: those of the model, or of its adapters.
    trained: dict[str, tuple[int, ...]]
    optimizer: optax.GradientTransformation  # updates the trained parameters
    balancer: optax.GradientTransformation  # updates the balancing biases

    def batch_shape(self, stage: BatchStage) -> tuple[int, int, int]:
        """Return (micro-batches, sequences of a micro-batch over all devices, tokens of a sequence).

        `InputError` if the sequences of a step do not divide into micro-batches on these devices.
        """
        phase, shards = self.config.phases[stage.phase], batch_shards(self.placement.mesh)
        micro = micro_batch(self.config, stage, shards)
        if stage.sequences % (shards * micro):
            micro = 1 if self.config.batch_for(phase).micro_batch is None else micro
            parts = counted(shards, "data-parallel shard") + ("" if micro == 1 else f" × micro_batch {micro}")
            gives = f"{self.config.batch_key(phase)} gives {counted(stage.sequences, 'sequence')}"
            raise InputError(f"{gives}, but must give a multiple of {shards * micro} ({parts}).")
        return stage.sequences // (shards * micro), shards * micro, stage.context


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
