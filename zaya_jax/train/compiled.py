"""Compiled steps, by what they depend on: the next stage's is made while this one runs."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jax.sharding import Mesh

from zaya_jax.config import Config
from zaya_jax.config.phases import Remat
from zaya_jax.config.stages import Stage, stages
from zaya_jax.parallel.mesh import batch_sharding, batch_shards, check_batch
from zaya_jax.train.state import make_blueprint
from zaya_jax.train.step import make_evaluation_step, make_train_step

_TYPES = {"tokens": np.int32, "targets": np.int32, "segment_ids": np.int32, "positions": np.int32,
          "loss_mask": np.bool_}  # fmt: skip


class StepKey(NamedTuple):
    """Stages of the same key share a compiled step."""

    rope_base: float
    remat: Remat
    micro_batches: int
    sequences: int  # a micro-batch, on all devices together
    context: int


def step_key(config: Config, stage: Stage, mesh: Mesh) -> StepKey:
    """What the step of a stage is compiled for."""
    phase = config.phases[stage.phase]
    micro = config.batch_of(phase).micro
    sequences = stage.sequences if micro is None else micro * batch_shards(mesh)
    return StepKey(config.model_of(phase).rope_base, config.remat_of(phase), stage.sequences // sequences, sequences,
                   stage.context)  # fmt: skip


def check_stages(config: Config, mesh: Mesh) -> None:
    """Raise `InputError` where a stage's batch, or a micro-batch of it, does not split evenly over the devices."""
    for stage in stages(config):
        phase = config.phases[stage.phase]
        where, micro = f"phases[{stage.phase}] ({phase.name}).batch", config.batch_of(phase).micro
        check_batch(mesh, stage.sequences, where, 1 if micro is None else micro)


def compile_step(config: Config, stage: Stage, mesh: Mesh, state: Any) -> Callable:
    """(state, batch) → (state, metrics), compiled for a stage; the state is donated.

    Args:
      config: of the run.
      stage: whose batches have leaves [micro-batches, sequences, context].
      mesh: where it runs.
      state: abstract, with shardings.
    """
    key = step_key(config, stage, mesh)
    shape, sharding = (key.micro_batches, key.sequences, key.context), batch_sharding(mesh, leading=1)
    batch = {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in _TYPES.items()}
    step = make_train_step(config, make_blueprint(config, stage.phase), mesh)
    return jax.jit(step, donate_argnums=0).lower(state, batch).compile()


class CompiledSteps:
    """The steps of a run's stages, each compiled once and before it is needed; a context manager."""

    def __init__(self, config: Config, mesh: Mesh, state: Any) -> None:
        """Compile nothing yet; `state` is abstract, with shardings."""
        self._config, self._mesh, self._state = config, mesh, state
        self._pool = ThreadPoolExecutor(1, "compile")
        self._steps: dict[StepKey, Future[Callable]] = {}
        self._evaluations: dict[float, Callable] = {}

    def __enter__(self) -> Self:
        """Compile until the end of a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give up what is not begun, wait for what is."""
        self._pool.shutdown(cancel_futures=True)

    def step(self, stage: Stage) -> Callable:
        """The compiled step of a stage, waited for where it is not ready; from now on the next stage's is made."""
        found = self._begin(stage).result()
        # The last step of a stage may already belong to the next one's key, so that nothing is begun twice.
        after = [one for one in stages(self._config) if one.first_step > stage.first_step]
        keep = {self._key(one) for one in [stage, *after]}
        self._steps = {key: step for key, step in self._steps.items() if key in keep}
        if after:
            self._begin(after[0])
        return found

    def evaluation(self, phase: int) -> Callable[..., dict[str, jax.Array]]:
        """The evaluation step with the positions of a phase, compiled at its first call."""
        base = self._config.model_of(self._config.phases[phase]).rope_base
        if base not in self._evaluations:
            step = make_evaluation_step(self._config, make_blueprint(self._config, phase), self._mesh)
            self._evaluations[base] = jax.jit(step)
        return self._evaluations[base]

    def _begin(self, stage: Stage) -> Future[Callable]:
        key = self._key(stage)
        if key not in self._steps:
            self._steps[key] = self._pool.submit(compile_step, self._config, stage, self._mesh, self._state)
        return self._steps[key]

    def _key(self, stage: Stage) -> StepKey:
        return step_key(self._config, stage, self._mesh)
