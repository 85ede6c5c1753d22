"""The trainer: steps through the stages of a run, evaluates, saves."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import Config
from zaya_jax.config.stages import BatchStage, phase_steps, stages, total_steps
from zaya_jax.data.pipeline import Batch, TrainBatches
from zaya_jax.errors import Preempted, RunStopped, WorkerLost
from zaya_jax.evaluate.evaluator import Evaluator, ModelSnapshot
from zaya_jax.model.tree import Arrays
from zaya_jax.parallel.multihost import is_primary
from zaya_jax.parallel.preemption import Preemption
from zaya_jax.run.folder import CONFIG, METRICS, PHASES, record_changes, run_folder, write_phase_ends
from zaya_jax.run.metrics import DiskGuard, MetricSink, read_rows
from zaya_jax.train.compiled import CompiledSteps
from zaya_jax.train.console import ConsoleReport
from zaya_jax.train.memory_errors import out_of_memory
from zaya_jax.train.plot import plot_run
from zaya_jax.train.program import Programs
from zaya_jax.train.resumption import checkpoint_metadata
from zaya_jax.train.state import TrainState
from zaya_jax.train.step_logger import StepLogger

PICTURE = "loss.png"


@dataclasses.dataclass
class Trainer:
    """A run in training.

    Attributes:
      config: of the run.
      state: after the last step.
      base: the frozen parameters under adapters; {} without adapters.
      first_step: steps done before those of this run folder.
      batches: one a step, at the position of `state`.
      programs: of all phases.
      compiled: the steps of all stages.
      store: of checkpoints.
      evaluators: score the model every `evaluation.every` steps and at the end of each phase.
      sinks: take the rows of each step.
      console: prints what a person should know.
      disk: guards the files of the run folder.
      preemption: tells whether the run was asked to end.
      steps_done: up to `state`.
      scores: of all evaluators, for `state`; {} where it has not been evaluated.
    """

    config: Config
    state: TrainState
    base: Arrays
    first_step: int
    batches: TrainBatches
    programs: Programs
    compiled: CompiledSteps
    store: CheckpointStore
    evaluators: Sequence[Evaluator]
    sinks: Sequence[MetricSink]
    console: ConsoleReport
    disk: DiskGuard
    preemption: Preemption
    steps_done: int = dataclasses.field(init=False)
    scores: dict[str, Any] = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Nothing is trained yet."""
        self.steps_done = int(jax.device_get(self.state.step))
        self.folder = run_folder(self.config)
        self._phase_ends = {end for _, end in phase_steps(self.config)}
        self._logger = StepLogger(self.config, self.sinks, self.console.throughput)
        self._resumed_at = self.steps_done
        self.console.labels = {evaluator.name: evaluator.label for evaluator in self.evaluators}
        self.store.ready = self._sync

    def run(self) -> None:
        """Train until the last phase is done, evaluated and saved.

        Raises:
          RunStopped: too many steps in a row were skipped, or nothing could be saved for too long.
          Preempted: the run was asked to end, and has saved.
        """
        self._record_changes()
        self._write_phase_ends()
        if self.steps_done and self.store.latest() == self.steps_done:
            self.console.say(f"Resuming after step {self.steps_done} of {total_steps(self.config)}.")
        for stage in stages(self.config):
            if self.steps_done < stage.end:
                self._train_stage(stage)
        if not self.scores:  # an earlier call has done the last step
            self._enter_phase(len(self.config.phases) - 1)
            self.evaluate()
        self._wait_until_saved()

    def step(self) -> None:
        """Train one step of the current stage; its metrics are read while the next one runs."""
        wait_start = time.monotonic()
        batch = self._next_batch()
        data_wait = time.monotonic() - wait_start
        placed = self._placement.place(batch, self._micro_batches, self._placement.share)
        with jax.transfer_guard("disallow"):
            self.state, metrics = self._train_step(self.state, placed, self.base)
        self.steps_done += 1
        self.scores = {}
        self._logger.start_step(self.steps_done, metrics, data_wait)

    def evaluate(self) -> dict[str, Any]:
        """Let every evaluator score the model, and record the last step with its scores."""
        self._logger.wait()  # the evaluation is not a part of the step's time
        jax.block_until_ready(self.state)  # what fails in a step is not taken for a failure of the evaluation
        model = ModelSnapshot(self.state.params, self.state.balance, self.base, self._placement, self._evaluation_step)
        with out_of_memory("The evaluation", "Lower evaluation.batch_size"):
            for evaluator in self.evaluators:
                self.scores |= evaluator.evaluate(model)
        self._logger.record(self.scores)
        return self.scores

    def save(self) -> None:
        """Start saving; one save is in flight at a time."""
        self._logger.record()
        loss = self.scores.get("heldout_loss")
        metadata = checkpoint_metadata(self.config, self.steps_done, self.batches.get_state(), loss, self.first_step)
        self.store.save(self.steps_done, self.state, metadata)

    def _train_stage(self, stage: BatchStage) -> None:
        """Step until the stage is done; evaluate, save and end where it is time to."""
        self._train_step = self.compiled.step(stage)
        self._micro_batches = self.programs[stage.phase].batch_shape(stage)[0]
        self._enter_phase(stage.phase)
        self.preemption.arm()
        self._logger.restart_clock()
        while self.steps_done < stage.end:
            self.step()
            phase_ends = self.steps_done in self._phase_ends
            evaluates = phase_ends or self.steps_done % self.config.evaluation.every == 0
            if evaluates:
                self.evaluate()
                self._draw()  # before the save: what a restart takes for done has its picture
            saves = phase_ends or self._save_is_due()
            ends = self.preemption.reached()
            if saves or ends:
                self.save()
            if ends:
                raise self._preempted(f"step {self.steps_done}", self.store.wait())
            if phase_ends:
                self.store.wait()  # before it is named
                self._write_phase_ends()
            if evaluates or saves:
                self._logger.restart_clock()

    def _enter_phase(self, phase: int) -> None:
        """Lay out state and base as the phase does, whose layout may be another than that of the last one."""
        self._placement = self.programs[phase].placement
        self._evaluation_step = self.compiled.evaluation(phase)
        place = self._placement.shardings
        self.state, self.base = (jax.device_put(tree, place(tree)) for tree in (self.state, self.base))

    def _save_is_due(self) -> bool:
        """Whether it is time for a checkpoint, or for another try after a save that failed."""
        every, retry_every = self.config.checkpoint.every, self.config.train.log_every
        if self.steps_done % every == 0 and not self.store.backing_off():
            return True
        return self.steps_done % retry_every == 0 and self.store.due()

    def _next_batch(self) -> Batch:
        """The next batch; where a process that reads is lost, the run ends, saved if that can be."""
        try:
            return next(self.batches)
        except WorkerLost as error:
            # Other processes do not know, and saving takes all.
            saved = self.steps_done > 0 and jax.process_count() == 1
            if saved:
                self.save()
                saved = self.store.wait()
            if self.preemption.signalled:  # as all processes of the group were
                raise self._preempted(f"step {self.steps_done}", saved) from error
            after = f" Step {self.steps_done} is saved. The same command resumes from there." if saved else ""
            raise RunStopped(f"{error}{after}") from error

    def _wait_until_saved(self) -> None:
        """Wait until the last checkpoint is saved, and everything that could not be written before."""
        if not self.store.finish(self.save, self.preemption.reached):
            raise self._preempted("the last step", saved=False)
        self._write_phase_ends()  # of which the last may have been saved just now
        path = self.folder / PICTURE
        if self.disk.problem(path) or not path.exists():
            self._draw()

    def _preempted(self, after: str, saved: bool) -> Preempted:
        outcome = "is saved. The same command resumes from there" if saved else "could not be saved"
        stop = self.preemption
        return Preempted(f"Stopped by {stop.name} after {after}, which {outcome}.", stop.status)

    def _sync(self) -> str:
        """In process 0, before each save: a sentence where a row or a change of settings cannot be written.

        No checkpoint is newer than its rows, or than the record of the settings it was made with.
        """
        if self.disk.problem(self.folder / CONFIG):
            self._record_changes()
        problems = [self.disk.problem(self.folder / CONFIG), *(sink.sync() for sink in self.sinks)]
        return next(filter(None, problems), "")

    def _write(self, name: str, action: Callable[[], None]) -> None:
        """Write a file of the run folder, in process 0."""
        if is_primary():
            with self.disk.writing(self.folder / name):
                action()

    def _record_changes(self) -> None:
        """Record which settings changed where this process took the run over."""
        self._write(CONFIG, lambda: record_changes(self.folder, self.config, self._resumed_at))

    def _write_phase_ends(self) -> None:
        self._write(PHASES, lambda: write_phase_ends(self.folder, self.config, self.store.steps()))

    def _draw(self) -> None:
        self._write(PICTURE, lambda: plot_run(read_rows(self.folder / METRICS), self.folder / PICTURE))
