"""The training loop: prepare, restore, step, look, save."""

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax

from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import Config, to_yaml
from zaya_jax.config.stages import first_step, phase_steps, stage_at, stages, tokens_before, total_steps
from zaya_jax.data.pipeline import Batch, TrainBatches, heldout_batches, train_batches
from zaya_jax.data.sources import Prepared, open_sources
from zaya_jax.data.tokenizer import vocabulary_warning
from zaya_jax.errors import InputError, Preempted, RunStopped, WorkerLost
from zaya_jax.evaluate.heldout import HeldoutLoss, evaluate_each, together
from zaya_jax.model.arithmetic import training_flops_per_token
from zaya_jax.model.lora import merged
from zaya_jax.model.tree import Arrays, with_values
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.batch import Share, share_of
from zaya_jax.parallel.layout import Layout
from zaya_jax.parallel.mesh import replicated
from zaya_jax.parallel.multihost import broadcast_text, check_alike, is_primary, primary_first
from zaya_jax.parallel.preemption import Preemption
from zaya_jax.run.checkpoints import has_checkpoint
from zaya_jax.run.folder import (
    CHECKPOINTS,
    CONFIG,
    METRICS,
    PHASES,
    TIMINGS,
    claim_run,
    lock_run,
    name_phases,
    record_changes,
    run_folder,
)
from zaya_jax.run.metrics import DiskGuard, JsonlFile, JsonlTracker, NoTracker, StepFiles, read_rows
from zaya_jax.train.base import NO_BASE, Base, check_base, note_base, open_base
from zaya_jax.train.beginning import begin, describe, go_on, resume_from
from zaya_jax.train.compiled import CompiledSteps, check_stages, step_key
from zaya_jax.train.console import ConsoleReport
from zaya_jax.train.kernels import choose_kernels
from zaya_jax.train.memory_check import check_memory
from zaya_jax.train.memory_errors import TRAINING_REMEDY, out_of_memory
from zaya_jax.train.plot import plot_run
from zaya_jax.train.run_tokenizer import write_tokenizer
from zaya_jax.train.state import TrainState, layout_of, make_blueprint, mesh_of
from zaya_jax.train.step_logger import StepLogger

PICTURE = "loss.png"


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves in memory.

    Attributes:
      config: of the run.
      state: the last state, from which training could go on.
      run_dir: folder with `config.yaml`, `metrics.jsonl`, `timings.jsonl`, `checkpoints/` and `loss.png`.
      heldout: loss over the held-out batches of all sources, as in the last row of `metrics.jsonl`.
      heldout_by_source: that of each source that holds text out.
      prepared: the sources, their tokenizer, and what compressors need for the corpus' held-out text.
      base: what adapters are of.
    """

    config: Config
    state: TrainState
    run_dir: Path
    heldout: HeldoutLoss
    heldout_by_source: dict[str, HeldoutLoss]
    prepared: Prepared
    base: Base = NO_BASE

    @functools.cached_property
    def model(self) -> Zaya:
        """The trained fp32 parameters, all of them on every device, with the positions of the last phase.

        Adapters are merged, in the compute dtype, which they were trained in.
        """
        params, lora = self.state.params, self.config.lora
        params = params if lora is None else merged(self.base.params, params, lora.scale)
        params = jax.device_put(params, replicated(mesh_of(self.config, -1)))
        return with_values(make_blueprint(self.config, -1).model, {**params, **self.state.balance})


def run_training(config: Config) -> TrainResult:
    """Train as configured, through all phases; go on where an earlier call was interrupted.

    Raises:
      InputError: the configuration, the corpus, or the run folder cannot be used; nothing is overwritten.
      RunStopped: too many steps in a row were skipped, or nothing could be saved for too long.
      Preempted: the process was asked to end (Ctrl-C, SIGTERM), and has saved.
    """
    config.check()
    _check_precision(config)
    check_alike(to_yaml(config))
    check_stages(config)
    check_memory(config)
    boundaries = [end for _, end in phase_steps(config)]
    with contextlib.ExitStack() as stack:
        stack.enter_context(out_of_memory("Training", TRAINING_REMEDY))
        folder = primary_first(lambda: stack.enter_context(lock_run(config)) if is_primary() else run_folder(config))
        prepared = primary_first(lambda: open_sources(config))
        if is_primary() and (warning := vocabulary_warning(prepared.tokenizer, config.model.vocab_size)):
            print(warning, file=sys.stderr)
        shares = [share_of(mesh_of(config, phase)) for phase in range(len(config.phases))]
        stop = stack.enter_context(Preemption())
        with train_batches(config, prepared, shares=shares) as batches:
            watched = {name: list(heldout_batches(config, prepared, name, config.evaluation.batches))
                       for name in prepared.sources}  # fmt: skip
            # What process 0 sees: other machines may see what it has written only later.
            going_on = broadcast_text(str(has_checkpoint(folder / CHECKPOINTS))) == str(True)
            base = open_base(config, stage_at(config, first_step(config)).phase)
            state, first = None, first_step(config)
            if not going_on:
                state = begin(config, base) if config.resume_from is None else resume_from(config, batches)
                first = int(jax.device_get(state.step))
            if going_on:
                check_base(folder, config, base)
            else:
                note_base(folder, config, base)
            disk = DiskGuard()
            if is_primary():
                claim_run(folder, config)  # now that all that it begins with is known to be good
                write_tokenizer(folder, config, prepared)
            with CheckpointStore(folder / CHECKPOINTS, config.checkpoint, boundaries) as store:
                if state is None:
                    state, first = go_on(config, store, batches)
                else:
                    store.take_over()
                with CompiledSteps(config, choose_kernels(config).target) as compiled:
                    state, heldout = _run(config, folder, disk, stack, store, batches, state, first, base.params,
                                          compiled, watched, shares, stop)  # fmt: skip
                    if heldout is None:  # the run was finished before
                        last = len(config.phases) - 1
                        evaluation = functools.partial(compiled.evaluation(last), frozen=base.params)
                        heldout = evaluate_each(evaluation, state, watched, _layout(config, last))
                    about = describe(config, total_steps(config), batches.get_state(), _mean(heldout), first)
                    saved = store.finish(lambda: store.save(total_steps(config), state, about), stop.reached)
                    if not saved:
                        raise _preempted(stop, "the last step", saved)
                    _name_phases(folder, config, store, disk)  # of which the last may have been saved just now
                    if disk.problem(folder / PICTURE) or not (folder / PICTURE).exists():
                        _draw(folder, disk)
        return TrainResult(config, state, folder, together(heldout), heldout, prepared, base)


def _check_precision(config: Config) -> None:
    if config.train.compute_dtype == "float64" and not jax.config.read("jax_enable_x64"):
        raise InputError("train.compute_dtype is 'float64', which jax computes in where JAX_ENABLE_X64=1 is set (or "
                         "jax.config.update('jax_enable_x64', True) is called) before anything else.")  # fmt: skip


def _layout(config: Config, phase: int) -> Layout:
    return layout_of(config, make_blueprint(config, phase), mesh_of(config, phase))


def _run(config: Config, folder: Path, disk: DiskGuard, stack: contextlib.ExitStack, store: CheckpointStore,
         batches: TrainBatches, state: TrainState, first: int, base: Arrays, compiled: CompiledSteps,
         watched: dict[str, list[Batch]], shares: list[Share],
         stop: Preemption) -> tuple[TrainState, dict[str, HeldoutLoss] | None]:  # fmt: skip
    """Train until the last phase is done, and evaluate on the `watched` held-out batches of each source.

    Returns:
      The last state, and its held-out losses; None if no step was left to do.
    """
    step, steps = int(jax.device_get(state.step)), total_steps(config)
    boundaries = {end for _, end in phase_steps(config)}
    report = _console(config, batches, step)
    heldout: dict[str, HeldoutLoss] | None = None
    with report:
        store.say = disk.say = report.say
        # They stay open until the last save has succeeded, in case they cannot be written before.
        files = stack.enter_context(primary_first(lambda: _open_rows(folder, step, first, disk)))
        record = functools.partial(_record_changes, folder, config, step, disk)
        # No checkpoint is newer than its rows, or than the record of the settings it was made with.
        store.ready = lambda: (disk.problem(folder / CONFIG) and record()) or files.sync()
        record()
        _name_phases(folder, config, store, disk)
        if step and store.latest() == step:
            report.say(f"Going on after step {step} of {steps}.")
        elif files.metrics.dropped:
            report.say(f"There is no checkpoint of the {files.metrics.dropped} steps in {METRICS}: starting again from "
                       "the first.")  # fmt: skip

        journal = StepLogger(config, files, report)

        def save(loss: float | None = None) -> None:
            journal.settle()
            store.save(step, state, describe(config, step, batches.get_state(), loss, first))

        for stage in stages(config):
            if step >= stage.end:
                continue
            train_step, count = compiled.step(stage), step_key(config, stage).micro_batches
            layout = _layout(config, stage.phase)
            # Where a phase begins, its layout may be another.
            state, base = (jax.device_put(tree, layout.shardings(tree)) for tree in (state, base))
            look = functools.partial(compiled.evaluation(stage.phase), frozen=base)
            stop.arm()
            journal.restart_clock()
            while step < stage.end:
                asked = time.monotonic()
                batch = _read(batches, step, save, store, stop)
                data_wait = time.monotonic() - asked
                batch = layout.place(batch, count, shares[stage.phase])
                with jax.transfer_guard("disallow"):
                    state, metrics = train_step(state, batch, base)
                step += 1
                journal.begun(step, metrics, data_wait)
                boundary, heldout = step in boundaries, None
                looking = step % config.evaluation.every == 0 or boundary
                saving = boundary or (step % config.checkpoint.every == 0 and not store.backing_off())
                if looking:
                    journal.wait()  # the evaluation is not a part of the step's time
                    heldout = evaluate_each(look, state, watched, layout)
                    journal.settle(heldout)
                    _draw(folder, disk)  # before the save: what a restart takes for done has its picture
                late = step % config.train.log_every == 0 and store.due()
                ending = stop.reached()
                if saving or late or ending:
                    save(_mean(heldout))
                if ending:
                    raise _preempted(stop, f"step {step}", store.settle())
                if boundary:
                    store.settle()  # before it is named
                    _name_phases(folder, config, store, disk)
                if looking or saving or late:
                    journal.restart_clock()
    return state, heldout


def _console(config: Config, batches: TrainBatches, start: int) -> ConsoleReport:
    steps = total_steps(config)
    return ConsoleReport(
        steps=steps, start=start, log_every=config.train.log_every,
        flops_per_token=lambda step: training_flops_per_token(
            config.model, stage_at(config, step - 1).context, frozen_head=config.lora is not None
        ),
        bytes_per_token=lambda step: batches.plan.phases[stage_at(config, step - 1).phase].bytes_per_token,
        tokens_left=lambda step: tokens_before(config, steps) - tokens_before(config, step),
        devices=jax.device_count(), device_kind=jax.devices()[0].device_kind,
        quiet=not is_primary(),
    )  # fmt: skip


def _open_rows(folder: Path, step: int, first: int, disk: DiskGuard) -> StepFiles:
    if not is_primary():
        return StepFiles(NoTracker(), NoTracker())
    return StepFiles(JsonlTracker(folder / METRICS, step, first, disk),
                     JsonlFile(folder / TIMINGS, step, first, disk))  # fmt: skip


def _mean(heldout: dict[str, HeldoutLoss] | None) -> float | None:
    return together(heldout).nats_per_token if heldout else None


def _read(
    batches: TrainBatches, step: int, save: Callable[[], None], store: CheckpointStore, stop: Preemption
) -> Batch:
    """The next batch; where a process that reads is lost, the run ends with what it has done until `step` saved."""
    try:
        return next(batches)
    except WorkerLost as error:
        saved = step > 0 and jax.process_count() == 1  # other processes do not know, and saving takes all
        if saved:
            save()
            saved = store.settle()
        if stop.signalled:  # as all processes of the group were
            raise _preempted(stop, f"step {step}", saved) from error
        after = f" Step {step} is saved. The same command resumes from there." if saved else ""
        raise RunStopped(f"{error}{after}") from error


def _preempted(stop: Preemption, after: str, saved: bool) -> Preempted:
    outcome = "is saved. The same command resumes from there" if saved else "could not be saved"
    return Preempted(f"Stopped by {stop.name} after {after}, which {outcome}.", stop.status)


def _record_changes(folder: Path, config: Config, step: int, disk: DiskGuard) -> str:
    """Record which settings changed after `step`; a sentence if that fails."""
    if is_primary():
        with disk.writing(folder / CONFIG):
            record_changes(folder, config, step)
    return disk.problem(folder / CONFIG)


def _name_phases(folder: Path, config: Config, store: CheckpointStore, disk: DiskGuard) -> None:
    if is_primary():
        with disk.writing(folder / PHASES):
            name_phases(folder, config, store.steps())


def _draw(folder: Path, disk: DiskGuard) -> None:
    if is_primary():
        with disk.writing(folder / PICTURE):
            plot_run(read_rows(folder / METRICS), folder / PICTURE)
