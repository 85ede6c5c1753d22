"""Compiled steps, by what they depend on: the next stage's is made while this one runs."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Self

import jax
import numpy as np

from zaya_jax.config import Config, ParallelConfig
from zaya_jax.config.phases import Remat
from zaya_jax.config.stages import Stage, stages
from zaya_jax.errors import InputError
from zaya_jax.ops.target import Target
from zaya_jax.parallel.mesh import batch_sharding, batch_shards, check_batch, replicated
from zaya_jax.train.base import abstract_base
from zaya_jax.train.memory_errors import check_compiled
from zaya_jax.train.state import TrainState, init_state, layout_of, make_blueprint, mesh_of
from zaya_jax.train.step import make_evaluation_step, make_train_step

_TYPES = {"tokens": np.int32, "targets": np.int32, "segment_ids": np.int32, "positions": np.int32,
          "loss_mask": np.bool_}  # fmt: skip


class StepKey(NamedTuple):
    """Stages of the same key share a compiled step."""

    rope_base: float
    remat: Remat
    parallel: ParallelConfig
    micro_batches: int
    sequences: int  # a micro-batch, on all devices together
    context: int


def step_key(config: Config, stage: Stage) -> StepKey:
    """What the step of a stage is compiled for."""
    phase = config.phases[stage.phase]
    micro = config.batch_of(phase).micro
    sequences = stage.sequences if micro is None else micro * batch_shards(mesh_of(config, stage.phase))
    return StepKey(config.model_of(phase).rope_base, config.remat_of(phase), config.parallel_of(phase),
                   stage.sequences // sequences, sequences, stage.context)  # fmt: skip


def check_stages(config: Config) -> None:
    """Raise `InputError` where a phase's layout cannot be here, or a stage's batch does not split evenly over it."""
    for phase in config.phases:
        parallel = config.parallel_of(phase)
        if parallel.expert > 1 and parallel.expert_exchange == "ragged" and jax.default_backend() == "cpu":
            raise InputError(f"{config.parallel_key(phase)}.expert_exchange is 'ragged', which CPUs do not have; "
                             "take 'all_gather'.")  # fmt: skip
    for stage in stages(config):
        phase = config.phases[stage.phase]
        where, micro = config.batch_key(phase), config.batch_of(phase).micro
        mesh = mesh_of(config, stage.phase)
        check_batch(mesh, stage.sequences, where, 1 if micro is None else micro)


def abstract_state(config: Config, phase: int) -> TrainState:
    """Shapes, dtypes and shardings of the state in a phase."""
    blueprint = make_blueprint(config, phase)
    shapes = jax.eval_shape(lambda: init_state(config, blueprint))
    shardings = layout_of(config, blueprint, mesh_of(config, phase)).shardings(shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def trace_step(config: Config, stage: Stage, target: Target | None = None) -> jax.stages.Traced:
    """(state, batch, base) → (state, metrics), traced for a stage and `target`; the state is donated.

    The batch's leaves are [micro-batches, sequences, context]; all lie as the phase's layout says. `base` is {} without
    adapters.
    """
    key, mesh, state = step_key(config, stage), mesh_of(config, stage.phase), abstract_state(config, stage.phase)
    shape, sharding = (key.micro_batches, key.sequences, key.context), batch_sharding(mesh, leading=1)
    types = _TYPES | ({"sources": np.int16} if len(config.data.source_names) > 1 else {})
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in types.items()}
    step = make_train_step(config, make_blueprint(config, stage.phase, target), mesh)
    out = (jax.tree.map(lambda x: x.sharding, state), replicated(mesh))
    return jax.jit(step, donate_argnums=0, out_shardings=out).trace(state, batch, abstract_base(config, stage.phase))


def compile_step(config: Config, stage: Stage, target: Target | None = None) -> Callable:
    """`trace_step`, compiled for the devices of this job."""
    return trace_step(config, stage, target).lower().compile()


class CompiledSteps:
    """The steps of a run's stages, each compiled once and before it is needed; a context manager."""

    def __init__(self, config: Config, target: Target | None = None) -> None:
        """Compile nothing yet; then for `target`, or what the first device is where None."""
        self._config, self._target = config, target
        self._pool = ThreadPoolExecutor(1, "compile")
        self._steps: dict[StepKey, Future[Callable]] = {}
        self._evaluations: dict[tuple[float, ParallelConfig], Callable] = {}

    def __enter__(self) -> Self:
        """Compile until the end of a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give up what is not begun, wait for what is."""
        self._pool.shutdown(cancel_futures=True)

    def step(self, stage: Stage) -> Callable:
        """The compiled step of a stage, waited for where it is not ready; from now on the next stage's is made."""
        found = self._begin(stage).result()
        check_compiled(found, self._config.phase_key(stage.phase))  # not earlier: another step may still run
        # The last step of a stage may already belong to the next one's key, so that nothing is begun twice.
        after = [one for one in stages(self._config) if one.first_step > stage.first_step]
        keep = {step_key(self._config, one) for one in [stage, *after]}
        self._steps = {key: step for key, step in self._steps.items() if key in keep}
        if after:
            self._begin(after[0])
        return found

    def evaluation(self, phase: int) -> Callable[..., dict[str, jax.Array]]:
        """The evaluation step with the positions and the layout of a phase, compiled at its first call."""
        config, one = self._config, self._config.phases[phase]
        key = config.model_of(one).rope_base, config.parallel_of(one)
        if key not in self._evaluations:
            step = make_evaluation_step(config, make_blueprint(config, phase, self._target), mesh_of(config, phase))
            self._evaluations[key] = jax.jit(step)
        return self._evaluations[key]

    def _begin(self, stage: Stage) -> Future[Callable]:
        key = step_key(self._config, stage)
        if key not in self._steps:
            self._steps[key] = self._pool.submit(compile_step, self._config, stage, self._target)
        return self._steps[key]
