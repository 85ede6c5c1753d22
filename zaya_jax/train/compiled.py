"""Compiled steps, by what they depend on: the next stage's is made while this one runs."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

import jax

from zaya_jax.config.stages import BatchStage, stages
from zaya_jax.train.memory_errors import check_compiled
from zaya_jax.train.program import PhaseProgram, Programs

# Stages of the same program and batch shape share a compiled step.
StepKey = tuple[PhaseProgram, tuple[int, int, int]]


class CompiledSteps:
    """The steps of a run's stages, each compiled once and before it is needed; a context manager."""

    def __init__(self, programs: Programs) -> None:
        """Compile nothing yet."""
        self.programs = programs
        self._pool = ThreadPoolExecutor(1, "compile")
        self._steps: dict[StepKey, Future[Callable]] = {}
        self._evaluations: dict[Any, Callable] = {}

    def __enter__(self) -> Self:
        """Compile until the end of a `with` block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give up what is not begun, wait for what is."""
        self._pool.shutdown(cancel_futures=True)

    def step(self, stage: BatchStage) -> Callable:
        """The compiled step of a stage, waited for where it is not ready; from now on the next stage's is made."""
        config = self.programs.config
        step = self._submit(stage).result()
        check_compiled(step, config.phase_key(stage.phase))  # not earlier: another step may still run
        # The last step of a stage may already belong to the next one's key, so that nothing is begun twice.
        later_stages = [following for following in stages(config) if following.first_step > stage.first_step]
        keep = {self._key(kept) for kept in [stage, *later_stages]}
        self._steps = {key: future for key, future in self._steps.items() if key in keep}
        if later_stages:
            self._submit(later_stages[0])
        return step

    def evaluation(self, phase: int) -> Callable[..., dict[str, jax.Array]]:
        """The evaluation step with the positions and the layout of a phase, compiled at its first call."""
        program = self.programs[phase]
        key = program.model.config, program.placement  # not the rematerialisation, which has no part in it
        if key not in self._evaluations:
            self._evaluations[key] = jax.jit(program.evaluation_step)
        return self._evaluations[key]

    def _key(self, stage: BatchStage) -> StepKey:
        program = self.programs[stage.phase]
        return program, program.batch_shape(stage)

    def _submit(self, stage: BatchStage) -> Future[Callable]:
        key = self._key(stage)
        if key not in self._steps:
            self._steps[key] = self._pool.submit(self.programs[stage.phase].compile, stage)
        return self._steps[key]
