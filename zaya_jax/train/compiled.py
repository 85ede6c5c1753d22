"""A cache of compiled steps, which compiles the next stage's step while the current stage runs."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

from zaya_jax.config.stages import BatchStage, stages
from zaya_jax.train.memory import check_compiled
from zaya_jax.train.program import PhaseProgram, Programs

# Stages of the same program and batch shape share a compiled step.
StepKey = tuple[PhaseProgram, tuple[int, int, int]]


class CompiledSteps(contextlib.AbstractContextManager["CompiledSteps"]):
    """The compiled steps of a run's stages. Each is compiled once, ahead of time; a context manager, for the time."""

    def __init__(
        self, programs: Programs, say: Callable[[str], None] = lambda _: None, keep: Callable[[], None] = lambda: None
    ) -> None:
        """Prepare to compile the steps of `programs`; nothing is compiled yet.

        `say` is called with a line before the caller waits, `keep` to keep the compiler's choices, see `autotuning`.
        """
        self.programs, self._say, self._keep, self._has_new = programs, say, keep, False
        self._pool = ThreadPoolExecutor(1, "compile")
        self._steps: dict[StepKey, Future[Callable]] = {}
        self._evaluations: dict[Any, Callable] = {}

    def __exit__(self, *_: object) -> None:
        """Cancel compilations that have not started, and wait for the one that has."""
        self._pool.shutdown(cancel_futures=True)

    def step(self, stage: BatchStage) -> Callable:
        """Return the compiled step of a stage, waiting for it if needed, and start compiling the next stage's."""
        config = self.programs.config
        future = self.start(stage)
        if not future.done():
            self._say(f"Compiling the training step of {config.phase_key(stage.phase)}")
        step = future.result()
        self._has_new = True
        check_compiled(step, config.phase_key(stage.phase))  # not earlier, while another step may hold memory
        # Later stages may share a compiled step with this one, so keep what any of them needs.
        later_stages = [following for following in stages(config) if following.first_step > stage.first_step]
        keep = {self._key(kept) for kept in [stage, *later_stages]}
        self._steps = {key: future for key, future in self._steps.items() if key in keep}
        if later_stages:
            self.start(later_stages[0])
        return step

    def evaluation(self, phase: int) -> Callable[..., dict[str, jax.Array]]:
        """Return the evaluation step for the RoPE and layout of a phase; it compiles at its first call."""
        program = self.programs[phase]
        key = program.model.config, program.placement  # without remat, which does not affect evaluation
        if key not in self._evaluations:
            self._say("Compiling the evaluation")
            self._evaluations[key] = program.jit_evaluation()
            self._has_new = True
        return self._evaluations[key]

    def keep_choices(self) -> None:
        """Keep what the compiler chose for programs that are new since the last call."""
        if self._has_new:
            self._has_new = False
            self._keep()

    def _key(self, stage: BatchStage) -> StepKey:
        program = self.programs[stage.phase]
        return program, program.batch_shape(stage)

    def start(self, stage: BatchStage) -> Future[Callable]:
        """Start compiling the step of a stage, unless it was compiled before, without waiting for it."""
        key = self._key(stage)
        if key not in self._steps:
            self._steps[key] = self._pool.submit(self.programs[stage.phase].compile, stage)
        return self._steps[key]
