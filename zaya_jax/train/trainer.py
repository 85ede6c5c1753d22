"""The trainer: runs a step, evaluates, and saves."""

import dataclasses
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config.stages import BatchStage, phase_steps, stage_at, total_steps
from zaya_jax.data.loading.batches import Batch, TrainBatches
from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.errors import ExitCode, Preempted, RunStopped, WorkerLost
from zaya_jax.evaluate.evaluator import Evaluator, ModelSnapshot
from zaya_jax.evaluate.heldout import HeldoutEvaluator
from zaya_jax.job.multihost import is_primary
from zaya_jax.job.preemption import Preemption
from zaya_jax.model.tree import Arrays
from zaya_jax.run.files import expanded
from zaya_jax.run.folder import CONFIG, METRICS, PHASES, record_changes, write_phase_ends
from zaya_jax.run.metrics import DiskGuard, read_rows
from zaya_jax.run.patience import PATIENCE, Patience
from zaya_jax.run.progress_record import Phase, ProgressRecord
from zaya_jax.run.signals import NAMES
from zaya_jax.train.compiled import CompiledSteps
from zaya_jax.train.memory import out_of_memory
from zaya_jax.train.profiler import StepProfiler
from zaya_jax.train.program import PhaseProgram
from zaya_jax.train.resumption import checkpoint_metadata
from zaya_jax.train.run_plot import plot_run
from zaya_jax.train.sample import draw_sample
from zaya_jax.train.state import TrainState
from zaya_jax.train.step_logger import StepLogger

LOSS_PLOT = "loss.png"


@dataclasses.dataclass
class Trainer:
    """Trains a run: `step`, `sample`, `evaluate` and `save`; `fit.run_training` calls them when they are due."""

    compiled: CompiledSteps  # programs and compiled steps of the run
    state: TrainState  # training state after the last step
    base: Arrays  # the frozen parameters under adapters; {} without adapters
    first_step: int  # number of steps done before this run folder's first
    batches: TrainBatches  # yields one batch a step, from the position of `state`
    tokenizer: Tokenizer  # that of the data
    patience: Patience  # how long the held-out loss has not fallen
    evaluators: Sequence[Evaluator]  # score the model every `evaluation.every` steps and at the end of each phase
    logger: StepLogger  # logs each step
    store: CheckpointStore  # the checkpoint store
    disk: DiskGuard  # reports files of the run folder that cannot be written
    preemption: Preemption  # tells whether a signal asked the run to end
    progress: ProgressRecord  # tells a supervisor what this process does
    profiler: StepProfiler  # traces the steps of `profile`
    steps_done: int = dataclasses.field(init=False)  # number of steps done
    # Of all evaluators for `state`; {} if it has not been evaluated.
    scores: dict[str, Any] = dataclasses.field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Enter the phase of the next step."""
        self._programs = self.compiled.programs
        self._config = self._programs.config
        self._folder = expanded(self._config.run_dir)
        self._phase_ends = {end for _, end in phase_steps(self._config)}
        self._resumed_at = self.steps_done = int(jax.device_get(self.state.step))
        self._stage: BatchStage | None = None  # whose step is compiled
        self._enter_phase(stage_at(self._config, self.steps_done).phase)

    def step(self) -> None:
        """Start one step, and log the one before it; enters the next stage if the last one is done."""
        stage = self._stage
        if stage is None or self.steps_done == stage.end:
            stage = self._enter_stage()
        if self.profiler.starts(self.steps_done):
            self.logger.wait()  # so that starting the trace counts neither as the last step's time nor as this one's
            self.progress.enter(Phase.SAVE)
            self.profiler.start(self.steps_done, self.state, self._train_step)
            self.logger.restart_clock()
        self.progress.enter(Phase.DATA)
        wait_start = time.monotonic()
        batch = self._next_batch()
        data_wait = time.monotonic() - wait_start
        self.progress.enter(Phase.DISPATCH)
        placed = self._placement.place(batch, self._micro_batches, self._placement.share)
        with jax.transfer_guard("disallow"):
            self.state, metrics = self._train_step(self.state, placed, self.base)
        self.steps_done += 1
        self.scores = {}
        self.progress.enter(Phase.DEVICE_WAIT)
        self.logger.start_step(self.steps_done, metrics, data_wait)
        # The trace has steps of one program only, and nothing between them.
        is_due = self.sample_is_due() or self.evaluation_is_due() or self.save_is_due()
        cut = self.steps_done == stage.end or is_due
        if self.profiler.ends(self.steps_done) or (self.profiler.runs and cut):
            self.logger.wait()
            self.progress.enter(Phase.SAVE)
            self.profiler.stop(self.steps_done, self.state)
            self.logger.restart_clock()

    def sample(self) -> None:
        """Continue the prompt of `sample`, and add the text to the row of the last step."""
        self._wait_for_step()
        text = draw_sample(self._config, self.tokenizer, self.program, self.state, self.base)
        self.logger.add({"sample": text})

    def evaluate(self) -> dict[str, Any]:
        """Score the model with every evaluator, and log the last step with the scores."""
        self._wait_for_step()
        loss_sums = self.compiled.evaluation(self._phase)
        model = ModelSnapshot(self.state.params, self.state.balance, self.base, self._placement, loss_sums, self._phase)
        with out_of_memory("The evaluation", "Lower evaluation.batch_size"):
            for evaluator in self.evaluators:
                self.scores |= evaluator.evaluate(model)
        self.logger.record(self.scores)
        return self.scores

    def save(self) -> None:
        """Start saving a checkpoint in the background; one save is in flight at a time."""
        self.progress.enter(Phase.SAVE)
        self.logger.record()
        loss = next((self.scores.get(each.name) for each in self.evaluators if each.ranks_checkpoints), None)
        position, kernels = self.batches.get_state(), self._programs.kernels.digest
        metadata = checkpoint_metadata(self._config, self.steps_done, position, loss, self.first_step, kernels)
        metadata[PATIENCE] = self.patience._asdict()
        self.compiled.keep_choices()
        self.store.save(self.steps_done, self.state, metadata, self._sync)

    @property
    def program(self) -> PhaseProgram:
        """The program of the phase that trained the model last."""
        return self._programs[self._phase]

    def observe(self, loss: float) -> None:
        """Take note of the held-out loss after the last step, for `evaluation.patience`."""
        self.patience = self.patience.after(self._config.phases[self._phase].name, self.steps_done, loss)

    def sample_is_due(self) -> bool:
        """Return whether to draw a sample after the last step; that of the finished run is in its report."""
        every = self._config.sample.every
        return every > 0 and self.steps_done % every == 0 and self.steps_done < total_steps(self._config)

    def evaluation_is_due(self) -> bool:
        """Return whether to evaluate after the last step."""
        return self.steps_done in self._phase_ends or self.steps_done % self._config.evaluation.every == 0

    def save_is_due(self) -> bool:
        """Return whether a checkpoint is due, or a retry after a failed save; all processes must ask."""
        every, retry_every = self._config.checkpoint.every, self._config.train.log_every
        if self.steps_done % every == 0 and not self.store.backing_off():
            return True
        return self.steps_done % retry_every == 0 and self.store.due()

    def preempted(self, after: str, saved: bool) -> Preempted:
        """Build the error that ends the run after a signal."""
        outcome = "is saved. Rerun the command to resume from it" if saved else "could not be saved"
        number = self.preemption.number or signal.SIGTERM  # if another process received a signal
        return Preempted(f"Stopped by {NAMES[number]} after {after}, which {outcome}.", ExitCode(128 + number))

    def record_changes(self) -> None:
        """Record the settings that changed at the step where this process resumed."""
        self._write(CONFIG, lambda: record_changes(self._folder, self._config, self._resumed_at))

    def write_phase_ends(self) -> None:
        """Record which checkpoint is the last one of each finished phase."""
        self._write(PHASES, lambda: write_phase_ends(self._folder, self._config, self.store.steps()))

    def draw(self, heldout: HeldoutEvaluator, *, only_missing: bool = False) -> None:
        """Plot the run, see `plot_run`; with `only_missing`, only if the last attempt failed or there was none."""
        path = self._folder / LOSS_PLOT
        if not only_missing or self.disk.problem(path) or not path.exists():
            self._write(LOSS_PLOT, lambda: plot_run(read_rows(self._folder / METRICS), path, heldout.compressors))

    def _wait_for_step(self) -> None:
        self.progress.enter(Phase.DEVICE_WAIT)
        self.logger.wait()  # so that what follows does not count as the step's time
        jax.block_until_ready(self.state)  # so that an error in the step is not blamed on what follows
        self.progress.enter(Phase.EVALUATE)

    def _write(self, name: str, action: Callable[[], None]) -> None:
        """Call `action`, which writes the file `name` of the run folder, in process 0 only."""
        if is_primary():
            with self.disk.writing(self._folder / name):
                action()

    def _sync(self) -> str:
        """Flush rows and changed settings to disk in process 0 before each save; return why that fails, else ''.

        A checkpoint must never be newer than its rows, or than the record of its settings.
        """
        if self.disk.problem(self._folder / CONFIG):
            self.record_changes()
        rows = self.logger.sync()
        return self.disk.problem(self._folder / CONFIG) or rows

    def _enter_stage(self) -> BatchStage:
        """Compile the step of the next stage, and enter its phase."""
        self.progress.enter(Phase.COMPILE)
        self._stage = stage = stage_at(self._config, self.steps_done)
        self._train_step = self.compiled.step(stage)
        self._enter_phase(stage.phase)
        self._micro_batches = self._programs[stage.phase].batch_shape(stage)[0]
        self.preemption.arm()
        self.logger.restart_clock()
        return stage

    def _enter_phase(self, phase: int) -> None:
        """Reshard state and base for the phase, whose layout may differ from the last one's."""
        self._phase, self._placement = phase, self._programs[phase].placement
        place = self._placement.shardings
        self.state = jax.device_put(self.state, place(self.state))
        self.base = jax.device_put(self.base, place(self.base))  # separately, to hold one copy at a time

    def _next_batch(self) -> Batch:
        """Return the next batch; if a data worker was lost, save if possible and end the run."""
        try:
            return next(self.batches)
        except WorkerLost as error:
            # Saving needs all processes, and the others do not know of the loss.
            saved = self.steps_done > 0 and jax.process_count() == 1
            if saved:
                self.save()
                saved = self.store.wait()
            if self.preemption.number:  # Ctrl-C signals the whole process group, workers included
                raise self.preempted(f"step {self.steps_done}", saved) from error
            after = f" Step {self.steps_done} is saved. Rerun the command to resume from it." if saved else ""
            raise RunStopped(f"{error}{after}") from error
