"""Training as one function: open the run, initialize or resume, train, evaluate and save until the last step."""

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import Config, to_yaml
from zaya_jax.config.checks import field_check
from zaya_jax.config.stages import first_step, phase_steps, stage_at, total_steps
from zaya_jax.data.loading.account import account, account_lines
from zaya_jax.data.loading.batches import train_batches
from zaya_jax.data.loading.sources import Prepared, open_sources
from zaya_jax.data.tokenizer import vocabulary_warning
from zaya_jax.errors import InputError, Superseded
from zaya_jax.evaluate.evaluator import Evaluator
from zaya_jax.evaluate.heldout import HeldoutEvaluator, HeldoutLoss
from zaya_jax.hardware.environment import combine_thresholds
from zaya_jax.job.multihost import broadcast, check_alike, is_primary, primary_first
from zaya_jax.job.peer_liveness import PeerLiveness
from zaya_jax.job.preemption import Preemption
from zaya_jax.model.tree import Arrays
from zaya_jax.model.zaya import Zaya
from zaya_jax.ops.target import GPU_PLATFORMS, current_target
from zaya_jax.parallel.kernels import keep_table, validated_kernels
from zaya_jax.parallel.storage import storage_rows, storage_table
from zaya_jax.run.checkpoints import CHECKPOINTS, has_checkpoint
from zaya_jax.run.fencing import Fence
from zaya_jax.run.files import expanded
from zaya_jax.run.folder import claim_run, lock_run
from zaya_jax.run.metrics import DiskGuard
from zaya_jax.run.patience import Patience, can_act
from zaya_jax.run.progress_record import Phase, ProgressRecord
from zaya_jax.run.status import track_status
from zaya_jax.train.autotuning import Autotuning
from zaya_jax.train.compiled import CompiledSteps
from zaya_jax.train.initialization import check_base, initialize, load_frozen_base, open_init_from
from zaya_jax.train.memory import TRAINING_REMEDY, check_memory, out_of_memory
from zaya_jax.train.profiler import StepProfiler
from zaya_jax.train.program import PhaseProgram, Programs, make_programs
from zaya_jax.train.resumption import resume, resume_from
from zaya_jax.train.run_tokenizer import write_tokenizer
from zaya_jax.train.sample import check_prompt, replicated_model
from zaya_jax.train.sinks import open_sinks, require_sinks
from zaya_jax.train.sinks.console import ConsoleReport
from zaya_jax.train.state import TrainState
from zaya_jax.train.step_logger import StepLogger
from zaya_jax.train.trainer import Trainer


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of a finished run."""

    config: Config  # configuration of the run
    state: TrainState  # the final training state
    run_dir: Path  # folder with `config.yaml`, `metrics.jsonl`, `timings.jsonl`, `checkpoints/` and `loss.png`
    heldout: HeldoutLoss  # loss over the held-out batches of all sources, as in the last row of `metrics.jsonl`
    heldout_by_source: dict[str, HeldoutLoss]  # the same for each source that has held-out text
    prepared: Prepared  # the sources, their tokenizer, and the compressor baselines of the corpus
    data: dict[str, dict[str, Any]]  # what of each source is used, see `data.loading.account.account`
    program: PhaseProgram  # program of the phase that trained last
    patience: Patience  # how long the held-out loss has not fallen
    base: Arrays  # the frozen parameters under adapters; {} without adapters
    fence: Fence  # tells whether other processes have resumed the run

    @functools.cached_property
    def model(self) -> Zaya:
        """The trained model in fp32, on every device, with the RoPE settings of `program`; adapters are merged."""
        return replicated_model(self.program, self.state, self.base, {})


def run_training(
    config: Config,
    peers: PeerLiveness | None = None,
    progress: ProgressRecord | None = None,
    leave: Callable[[Superseded], object] = lambda error: None,
) -> TrainResult:
    """Train through all phases of `config`, or resume from the newest checkpoint in its `run_dir`.

    `peers` are connections to the other processes of the job; `progress` tells a supervisor what this process does;
    `leave` ends the job at once, from any thread, if other processes resume the run: by default, this only raises.
    `InputError` if the configuration, the data or the run folder cannot be used; nothing is overwritten. `RunStopped`
    if too many steps in a row were skipped, or saving failed for too long, `Superseded` if other processes have resumed
    the run, `Preempted` if Ctrl-C, SIGTERM or SIGHUP ended it after it saved.
    """
    progress = progress or ProgressRecord()
    progress.enter(Phase.OPEN)
    programs, phase_ends = _checked_programs(config), [end for _, end in phase_steps(config)]
    with out_of_memory("Training", TRAINING_REMEDY), contextlib.ExitStack() as stack:
        enter = stack.enter_context
        # Data, checkpoints and kernels
        folder = primary_first(lambda: enter(lock_run(config)) if is_primary() else expanded(config.run_dir))
        prepared = primary_first(lambda: _open_sources(config))
        signals = enter(Preemption(peers and peers.stop_step, is_supervised=progress.is_supervised))
        shares = [programs[phase].placement.share for phase in range(len(config.phases))]
        batches = enter(train_batches(config, prepared, shares=shares))
        evaluators: list[Evaluator] = [heldout := HeldoutEvaluator(config, prepared)]
        must = field_check(config.evaluation, "evaluation")
        needs = "0 without held-out text, which a phase here does not have: raise --heldout of `data prepare`"
        must("patience", config.evaluation.patience == 0 or all(heldout.texts), needs)
        device = jax.devices()[0].device_kind
        console = ConsoleReport(config, batches.plan, device, evaluators=evaluators, quiet=not is_primary())
        store = enter(CheckpointStore(folder / CHECKPOINTS, config.checkpoint, phase_ends, console.say, leave))
        disk = DiskGuard(console.say, store.fence.check)
        progress.enter(Phase.COMPILE)  # after slow checks of the input, and before the state takes memory
        programs = programs.with_kernels(kernels := validated_kernels(config, folder))

        # The state: from the newest checkpoint, from that of another run, from weights, or from the seed
        progress.enter(Phase.RESTORE)
        chooses = current_target().platform in GPU_PLATFORMS and not config.train.deterministic
        kept = Autotuning(folder, chooses, is_primary(), store.fence.check, console.say)
        compiled = enter(CompiledSteps(programs, console.say, kept.write))
        # Process 0 decides: a shared file system may show its files to other machines later.
        resuming = broadcast(has_checkpoint(folder / CHECKPOINTS))
        # Adapters always need `init_from`. Without them it may be deleted once there is a checkpoint.
        weights = None if resuming and config.lora is None else open_init_from(config)
        stage = stage_at(config, first_step(config))
        base = load_frozen_base(programs[stage.phase], weights)
        patience = Patience()
        if resuming:
            check_base(folder, config, base, is_new=False)
            state, patience, first = resume(config, programs, store, batches)
        else:
            if config.resume_from is not None:
                state, patience = resume_from(config, programs, batches)
            else:
                if weights is None:
                    compiled.start(stage)  # at once, since every input has been checked
                state = initialize(programs[stage.phase], weights, base)
            check_base(folder, config, base, is_new=True)
            if is_primary():
                claim_run(folder, config)
            store.take_over(first := int(jax.device_get(state.step)))
        keep_table(folder, kernels.table, store.fence.check)

        # Everything that reports on the run
        notes: list[str] = []  # on its end, for `status.json`
        if is_primary():
            write_tokenizer(folder, config, prepared, weights)
            stack.callback(store.fence.watch())
            notes = enter(track_status(folder, store.fence.check))
            enter(out_of_memory("Training", TRAINING_REMEDY))  # within `track_status`, so that it has the message
        progress.start_training(step := int(jax.device_get(state.step)), folder)
        stack.callback(console.close)
        console.start(step)
        data = account(config, prepared, batches.plan)
        console.say("\n".join([*account_lines(data), *_layouts(programs)]))
        if not can_act(config):
            key = f"evaluation.patience={config.evaluation.patience}"
            console.say(f"{key} cannot end this run: no phase has more evaluations before its end (evaluation.every).")
        if step and store.latest() == step:
            console.say(f"Resuming after step {step} of {total_steps(config)}.")
        opened = primary_first(lambda: open_sinks(config, folder, step, first, disk))
        sinks = [enter(contextlib.closing(sink)) for sink in opened]
        window = config.profile if is_primary() else None
        profiler = enter(contextlib.closing(StepProfiler(window, folder, console.say)))
        profiler.warn_outside(step, total_steps(config))
        logger = StepLogger(config, [*sinks, console], progress)

        # The steps
        trainer = Trainer(
            compiled, state, base.params, first, batches, prepared.tokenizer, patience, evaluators, logger, store, disk,
            signals, progress, profiler,
        )  # fmt: skip
        del state, base  # so that the trainer can free what a step or a phase replaces
        trainer.record_changes()
        trainer.write_phase_ends()
        while trainer.steps_done < total_steps(config) and not trainer.patience.is_over(config, trainer.steps_done):
            trainer.step()
            if samples := trainer.sample_is_due():
                trainer.sample()
            is_phase_end, evaluates = trainer.steps_done in phase_ends, trainer.evaluation_is_due()
            if evaluates:
                trainer.observe(trainer.evaluate()[heldout.name])
                trainer.draw(heldout)  # before the save, so that the plot is never behind the checkpoint
            is_end = is_phase_end or trainer.patience.is_over(config, trainer.steps_done)
            saves, stops = is_end or trainer.save_is_due(), signals.reached()
            if saves or stops:
                trainer.save()
            if stops:
                raise trainer.preempted(f"step {trainer.steps_done}", store.wait())
            if is_phase_end:
                store.wait()  # before `phases.json` names it
                trainer.write_phase_ends()
            if samples or evaluates or saves:
                logger.restart_clock()

        # The end: nothing is left unsaved
        if trainer.steps_done < total_steps(config):
            notes.append(f"evaluation.patience ended it after step {trainer.steps_done} of {total_steps(config)}.")
        if not trainer.scores:  # if the run resumed after its last step
            trainer.evaluate()
        progress.enter(Phase.FINISH)
        if not store.finish(trainer.save, signals.reached):
            raise trainer.preempted("the last step", saved=False)
        trainer.write_phase_ends()  # the last one may have been saved just now
        trainer.draw(heldout, only_missing=True)
        losses, last = (heldout.total, heldout.losses), (trainer.program, trainer.patience)
        return TrainResult(config, trainer.state, folder, *losses, prepared, data, *last, trainer.base, store.fence)


def _checked_programs(config: Config) -> Programs:
    """Make the programs of all phases; raise `InputError` if these devices cannot train the configuration."""
    config.check()
    if config.train.compute_dtype == "float64" and not jax.config.read("jax_enable_x64"):
        or_call = "or call jax.config.update('jax_enable_x64', True) before anything else"
        raise InputError(f"train.compute_dtype=float64 requires 64-bit jax. Set JAX_ENABLE_X64=1, {or_call}.")
    check_alike(f"{to_yaml(config)}\n{combine_thresholds()}")  # otherwise collectives would wait for each other
    primary_first(lambda: require_sinks(config))
    programs = make_programs(config)
    programs.check()
    check_memory(programs)
    return programs


def _open_sources(config: Config) -> Prepared:
    prepared = open_sources(config)
    check_prompt(config, prepared.tokenizer)
    if jax.process_count() > 1:
        _ = prepared.baselines  # now, while the others wait: later they would wait in a collective, which can time out
    if is_primary() and (warning := vocabulary_warning(prepared.tokenizer, config.model.vocab_size)):
        print(warning, file=sys.stderr)
    return prepared


def _layouts(programs: Programs) -> Iterator[str]:
    """Yield lines that tell how each layout of the run stores and gathers the parameters; none on one device."""
    before: list[str] = []
    for phase in range(len(programs.config.phases)):
        program = programs[phase]
        rows = storage_rows(program.placement, [program.abstract_state, program.abstract_base])
        lines = storage_table(rows, program.placement.mesh.shape)
        if lines and lines != before:
            yield f"Layout of {programs.config.phase_key(phase)}:"
            yield from (f"  {line}" for line in lines)
        before = lines
