"""The program of a phase: what is trained, where it lies, and the functions that are compiled; built once for a run."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import optax

from zaya_jax.config import Config, ModelConfig, ParallelConfig
from zaya_jax.config.phases import Remat
from zaya_jax.config.stages import BatchStage, stages
from zaya_jax.errors import InputError
from zaya_jax.model.layers import Role
from zaya_jax.model.lora import adapter_roles, adapter_shapes
from zaya_jax.model.tree import compute_dtypes, fused, roles, shapes
from zaya_jax.model.zaya import Zaya, abstract_model
from zaya_jax.ops.registry import KernelSelection
from zaya_jax.optim.balance import make_balancer
from zaya_jax.optim.build import make_optimizer
from zaya_jax.parallel.mesh import AnyMesh, batch_sharding, batch_shards, check_batch, make_mesh, replicated
from zaya_jax.parallel.placement import Placement, device_kernels, make_placement
from zaya_jax.train.state import TrainState, init_state
from zaya_jax.train.step import make_evaluation_step, make_train_step

_TYPES = {"tokens": np.int32, "targets": np.int32, "segment_ids": np.int32, "positions": np.int32,
          "loss_mask": np.bool_}  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class PhaseProgram:
    """All that is fixed over a phase. Nothing is allocated, and nothing is compiled before it is asked for.

    Attributes:
      config: of the run.
      placement: mesh, sharding and operations.
      model: shapes alone, with the positions of the phase.
      remat: what the backward pass computes again.
      roles: role of every parameter there is, by name.
      trained: shape of each parameter that the loss moves: all of the model's, or adapters that stand beside them.
      optimizer: moves the trained parameters.
      balancer: moves the balancing biases.
    """

    config: Config
    placement: Placement
    model: Zaya
    remat: Remat
    roles: dict[str, Role]
    trained: dict[str, tuple[int, ...]]
    optimizer: optax.GradientTransformation
    balancer: optax.GradientTransformation

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state."""
        return self.placement.abstract(jax.eval_shape(lambda: init_state(self)))

    @functools.cached_property
    def abstract_base(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Those of each parameter under adapters, in its compute dtype; {} where all parameters are trained."""
        if self.config.lora is None:
            return {}
        dtypes = compute_dtypes(self.roles, self.config.train.compute_dtype)
        return self.placement.abstract(
            {name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in shapes(self.model).items()}
        )

    @functools.cached_property
    def train_step(self) -> Callable[..., Any]:
        """`step.make_train_step`."""
        return make_train_step(self)

    @functools.cached_property
    def evaluation_step(self) -> Callable[..., dict[str, jax.Array]]:
        """`step.make_evaluation_step`."""
        return make_evaluation_step(self)

    def batch_shape(self, stage: BatchStage) -> tuple[int, int, int]:
        """Micro-batches, sequences of a micro-batch on all devices together, and tokens of a sequence."""
        micro = self.config.batch_for(self.config.phases[stage.phase]).micro_batch
        sequences = stage.sequences if micro is None else micro * batch_shards(self.placement.mesh)
        return stage.sequences // sequences, sequences, stage.context

    def trace(self, stage: BatchStage) -> jax.stages.Traced:
        """(state, batch, base) → (state, metrics), traced for a stage; the state is donated.

        The batch's leaves are of `batch_shape`, and everything is placed as the placement says. `base` is {} without
        adapters.
        """
        mesh, shape, state = self.placement.mesh, self.batch_shape(stage), self.abstract_state
        types = _TYPES | ({"sources": np.int16} if len(self.config.data.source_names) > 1 else {})
        sharding = batch_sharding(mesh, leading=1)
        batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in types.items()}
        out = (jax.tree.map(lambda x: x.sharding, state), replicated(mesh))
        step = jax.jit(self.train_step, donate_argnums=0, out_shardings=out)
        return step.trace(state, batch, self.abstract_base)

    def compile(self, stage: BatchStage) -> Callable[..., Any]:
        """`trace`, compiled for the devices of the mesh."""
        return self.trace(stage).lower().compile()


class Programs:
    """The programs of all phases of a run; those of the same model, layout and rematerialisation share one."""

    def __init__(self, config: Config, kernels: KernelSelection, devices: Sequence[Any] | int | None = None) -> None:
        """Build the programs.

        Args:
          config: of the run.
          kernels: implementations of the operations, for the kind of device that there is.
          devices: of the mesh, those of this job where None; or how many there would be, to trace without them.

        Raises:
          InputError: the axes of a phase's layout do not make up the devices.
        """
        self.config, self.kernels, self._devices = config, kernels, devices
        programs: dict[Any, PhaseProgram] = {}
        self._phases: list[PhaseProgram] = []
        for phase in config.phases:
            model, parallel, remat = config.model_for(phase), config.parallel_for(phase), config.remat_for(phase)
            key = model, parallel, remat
            if key not in programs:
                mesh = make_mesh(parallel, devices, config.parallel_key(phase))
                programs[key] = _make_program(config, model, parallel, remat, mesh, kernels)
            self._phases.append(programs[key])

    def __getitem__(self, phase: int) -> PhaseProgram:
        """The program of a phase, by its place in `config.phases`."""
        return self._phases[phase]

    def with_kernels(self, kernels: KernelSelection) -> "Programs":
        """The same programs by other implementations of the operations."""
        return self if kernels == self.kernels else Programs(self.config, kernels, self._devices)

    def check(self) -> None:
        """Raise `InputError` where a layout cannot be here, or a stage's batch does not split evenly over it."""
        config = self.config
        for phase in config.phases:
            parallel, cpu = config.parallel_for(phase), self.kernels.target.platform == "cpu"
            if cpu and parallel.expert > 1 and parallel.expert_exchange == "ragged":
                raise InputError(f"{config.parallel_key(phase)}.expert_exchange=ragged is not available on CPUs. Set "
                                 "it to all_gather.")  # fmt: skip
        for stage in stages(config):
            phase = config.phases[stage.phase]
            micro = config.batch_for(phase).micro_batch
            check_batch(self[stage.phase].placement.mesh, stage.sequences, config.batch_key(phase), micro or 1)


def make_programs(config: Config, devices: Sequence[Any] | None = None) -> Programs:
    """The programs of a run on `devices`, those of this job where None, by the kernels that take its shapes."""
    return Programs(config, device_kernels(config.model, config.train.compute_dtype), devices)


def _make_program(
    config: Config, model_config: ModelConfig, parallel: ParallelConfig, remat: Remat, mesh: AnyMesh,
    kernels: KernelSelection,
) -> PhaseProgram:  # fmt: skip
    model = abstract_model(model_config)
    model_shapes, all_roles = shapes(model), roles(model)
    trained, exact = model_shapes, ()
    if config.lora is not None:
        trained = exact = adapter_shapes(model_shapes, all_roles, config.lora.rank)
        all_roles |= adapter_roles(all_roles)
    placement = make_placement(parallel, mesh, {**model_shapes, **trained}, all_roles, config.train.compute_dtype,
                               kernels, exact)  # fmt: skip
    options = dataclasses.replace(config.optimizer, matrices=config.matrices)
    optimizer = make_optimizer(options, {name: all_roles[name] for name in trained}, fused(model))
    return PhaseProgram(config, placement, model, remat, all_roles, trained, optimizer,
                        make_balancer(config.optimizer.balance))  # fmt: skip
