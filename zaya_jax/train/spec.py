"""The data of a phase, which are fixed while it lasts: model, placement, optimizer."""

import dataclasses

import optax

from zaya_jax.config import Config
from zaya_jax.config.checks import counted
from zaya_jax.config.phases import Remat
from zaya_jax.config.stages import BatchStage, micro_batch
from zaya_jax.errors import InputError
from zaya_jax.model.layers import Role
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.mesh import batch_shards
from zaya_jax.parallel.placement import Placement


@dataclasses.dataclass(frozen=True, eq=False)
class PhaseSpec:
    """Everything that is fixed during a phase."""

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
