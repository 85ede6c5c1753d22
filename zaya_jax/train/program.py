"""The program of a phase: shapes, shardings, optimizer and step functions, built once for the whole phase."""

import copy
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from zaya_jax.config import Config, PhaseConfig
from zaya_jax.config.stages import BatchStage, stages
from zaya_jax.errors import InputError
from zaya_jax.hardware.environment import step_options
from zaya_jax.model.arithmetic import total_parameters
from zaya_jax.model.lora import adapter_roles, adapter_shapes
from zaya_jax.model.tree import compute_dtypes, fused, roles, shapes
from zaya_jax.model.zaya import abstract_model
from zaya_jax.ops.registry import KernelSelection, select_kernels
from zaya_jax.ops.target import GPU_PLATFORMS, current_target
from zaya_jax.optim.balance import make_balancer
from zaya_jax.optim.build import make_optimizer
from zaya_jax.parallel.mesh import batch_sharding, make_mesh, replicated
from zaya_jax.parallel.placement import make_placement
from zaya_jax.train.spec import PhaseSpec
from zaya_jax.train.state import TrainState, init_state
from zaya_jax.train.step import make_evaluation_step, make_train_step

# XLA:CPU compiles in half the time with these: the step of configs/tiny.yaml (`.trace(stage).lower().compile()`) in 8.5
# seconds of CPU instead of 16.4, and it runs in 0.90 and 0.89. With 16.4M parameters a step would take 3 % longer,
# in bf16 13 %.
COMPILED_QUICKLY = {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False}
_FEW_PARAMETERS = 10_000_000
_TYPES = dict.fromkeys(("tokens", "targets", "segment_ids", "positions"), np.int32) | {"loss_mask": np.bool_}


class PhaseProgram(PhaseSpec):
    """The step functions of a phase. It allocates nothing, and compiles only on request."""

    @functools.cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the training state."""
        return self.placement.abstract(jax.eval_shape(lambda: init_state(self)))

    @functools.cached_property
    def abstract_base(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shapes, compute dtypes and shardings of the frozen parameters under adapters; {} without adapters."""
        if self.config.lora is None:
            return {}
        dtypes = compute_dtypes(self.roles, self.config.train.compute_dtype)
        frozen = {name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in shapes(self.model).items()}
        return self.placement.abstract(frozen)

    @functools.cached_property
    def train_step(self) -> Callable[..., Any]:
        """The training step, see `step.make_train_step`."""
        return make_train_step(self)

    @functools.cached_property
    def evaluation_step(self) -> Callable[..., dict[str, jax.Array]]:
        """The evaluation step, see `step.make_evaluation_step`."""
        return make_evaluation_step(self)

    def trace(self, stage: BatchStage) -> jax.stages.Traced:
        """Trace the training step of a stage, see `step.make_train_step`; the state is donated.

        The batch's leaves have the shape `batch_shape`, and all arguments the shardings of the placement.
        """
        mesh, shape, state = self.placement.mesh, self.batch_shape(stage), self.abstract_state
        types = _TYPES | ({"sources": np.int16} if len(self.config.data.source_names) > 1 else {})
        sharding = batch_sharding(mesh, leading=1)
        batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in types.items()}
        out = (jax.tree.map(lambda x: x.sharding, state), replicated(mesh))
        leaves = self.placement.leaves.values()
        gathers = shape[0] == 1 and any(leaf.gathered_in_layers for leaf in leaves)
        options = self._options(fsdp=any(leaf.by_layer for leaf in leaves), one_micro_batch=gathers)
        step = jax.jit(self.train_step, donate_argnums=0, out_shardings=out, compiler_options=options)
        return step.trace(state, batch, self.abstract_base)

    def jit_evaluation(self) -> Callable[..., dict[str, jax.Array]]:
        """Return the jitted evaluation step, which compiles at its first call."""
        return jax.jit(self.evaluation_step, compiler_options=self._options())

    def compile(self, stage: BatchStage) -> Callable[..., Any]:
        """Compile the training step of a stage for the devices of the mesh."""
        return self.trace(stage).lower().compile()

    def _options(self, *, fsdp: bool = False, one_micro_batch: bool = False) -> dict[str, bool | int | str] | None:
        """Return the compiler options of a step; CPUs need no flags to repeat results and to show instructions."""
        platform, dtype = self.placement.kernels.target.platform, self.config.train.compute_dtype
        is_small = dtype != "bfloat16" and total_parameters(self.config.model) < _FEW_PARAMETERS
        if platform == "cpu" and is_small:
            return known_options(COMPILED_QUICKLY)
        on_gpu = platform in GPU_PLATFORMS
        exact, traced = on_gpu and self.config.train.deterministic, on_gpu and self.config.profile is not None
        options = step_options(fsdp=fsdp, one_micro_batch=one_micro_batch, deterministic=exact, traced=traced)
        return known_options(options)


def known_options(options: Mapping[str, bool | int | str]) -> dict[str, bool | int | str] | None:
    """Return the compiler options that this version of XLA has; None if there are none. Versions differ in them."""
    return {name: value for name, value in options.items() if _is_known(name, value)} or None


@functools.cache
def _is_known(name: str, value: bool | int | str) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


class Programs:
    """The programs of all phases of a run. Phases with the same model, layout and remat share one."""

    def __init__(self, config: Config, kernels: KernelSelection, devices: Sequence[Any] | int | None = None) -> None:
        """Build the programs, with implementations of the operations for these devices.

        `devices` are those of the mesh: None for all of this job, or a number to trace for that many without having
        them. InputError if the product of a phase's mesh axes is not their number.
        """
        self.config, self.kernels, self._devices = config, kernels, devices
        programs: dict[Any, PhaseProgram] = {}
        self._phases: list[PhaseProgram] = []
        for phase in config.phases:
            key = config.model_for(phase), config.parallel_for(phase), config.remat_for(phase)
            if key not in programs:
                programs[key] = _make_program(config, phase, kernels, devices)
            self._phases.append(programs[key])

    def __getitem__(self, phase: int) -> PhaseProgram:
        """Return the program of a phase, by its index in `config.phases`."""
        return self._phases[phase]

    def with_kernels(self, kernels: KernelSelection) -> "Programs":
        """Return the programs with other implementations of the operations."""
        if kernels != self.kernels:
            return Programs(self.config, kernels, self._devices)
        programs = copy.copy(self)
        programs.kernels = kernels  # with the measurements behind the same implementations
        return programs

    def check(self) -> None:
        """Raise `InputError` if the devices do not support a layout, or it does not divide a stage's batch evenly."""
        config = self.config
        for phase in config.phases:
            parallel, cpu = config.parallel_for(phase), self.kernels.target.platform == "cpu"
            if cpu and parallel.expert > 1 and parallel.expert_exchange == "ragged":
                key = config.parallel_key(phase)
                raise InputError(f"{key}.expert_exchange=ragged is not available on CPUs. Set it to all_gather.")
        for stage in stages(config):
            self[stage.phase].batch_shape(stage)


def make_programs(config: Config, devices: Sequence[Any] | None = None) -> Programs:
    """Make the programs of a run on `devices` (None for all of this job), with the kernels that support its shapes."""
    kernels = select_kernels(current_target(), config.model, config.train.compute_dtype, None, config.ops)
    return Programs(config, kernels, devices)


def _make_program(config: Config, phase: PhaseConfig, kernels: KernelSelection, devices: Any) -> PhaseProgram:
    model, layout = abstract_model(config.model_for(phase)), config.parallel_for(phase)
    mesh = make_mesh(layout, devices, config.parallel_key(phase))
    model_shapes, all_roles = shapes(model), roles(model)
    trained, exact = model_shapes, ()
    if config.lora is not None:
        trained = exact = adapter_shapes(model_shapes, all_roles, config.lora.rank)
        all_roles |= adapter_roles(all_roles)
    dtype, all_shapes = config.train.compute_dtype, {**model_shapes, **trained}
    placement = make_placement(layout, mesh, all_shapes, all_roles, dtype, kernels, exact)
    options = dataclasses.replace(config.optimizer, matrices=config.matrices)
    optimizer = make_optimizer(options, {name: all_roles[name] for name in trained}, fused(model))
    balancer = make_balancer(config.optimizer.balance)
    return PhaseProgram(config, placement, model, config.remat_for(phase), all_roles, trained, optimizer, balancer)
