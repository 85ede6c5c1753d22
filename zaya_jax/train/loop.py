"""The training loop: prepare, restore, step, look, save."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from zaya_jax.checkpoint.store import CheckpointStore, environment
from zaya_jax.config import Config, to_dict
from zaya_jax.data.pipeline import Batch, TrainBatches, heldout_batches, train_batches
from zaya_jax.data.sources import Prepared, open_sources
from zaya_jax.errors import InputError, RunStopped
from zaya_jax.model.arithmetic import training_flops_per_token
from zaya_jax.model.tree import with_values
from zaya_jax.model.zaya import Zaya
from zaya_jax.parallel.mesh import batch_sharding, check_batch, make_mesh, replicated
from zaya_jax.train.console import ConsoleReport
from zaya_jax.train.evaluate import HeldoutLoss, evaluate_each, together
from zaya_jax.train.plot import plot_run
from zaya_jax.train.run_folder import CHECKPOINTS, METRICS, claim_run, open_run
from zaya_jax.train.state import Blueprint, TrainState, init_state, make_blueprint
from zaya_jax.train.step import make_evaluation_step, make_train_step
from zaya_jax.train.tracker import JsonlTracker, read_rows

PICTURE = "loss.png"


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a finished run leaves in memory.

    Attributes:
      model: with the trained fp32 parameters.
      state: the last state, from which training could go on.
      run_dir: folder with `config.yaml`, `metrics.jsonl`, `checkpoints/` and `loss.png`.
      heldout: loss over all held-out text.
      heldout_of: that of each source that holds text out.
      prepared: the sources, their tokenizer, and what compressors need for the corpus' held-out text.
    """

    model: Zaya
    state: TrainState
    run_dir: Path
    heldout: HeldoutLoss
    heldout_of: dict[str, HeldoutLoss]
    prepared: Prepared


def train(config: Config) -> TrainResult:
    """Train as configured; go on where an earlier call of the same configuration was interrupted.

    Raises:
      InputError: the configuration, the corpus, or the run folder cannot be used; nothing is overwritten.
      RunStopped: too many steps in a row had a loss or gradient that was not finite.
    """
    config.check()
    mesh = make_mesh()
    check_batch(mesh, config.train.global_batch // config.train.micro_batches, "train.global_batch / micro_batches")
    check_batch(mesh, config.evaluation.batch, "evaluation.batch")
    with open_run(config) as folder:
        prepared = open_sources(config)
        with train_batches(config, prepared) as batches:
            watched = {name: list(heldout_batches(config, prepared, name, config.evaluation.batches))
                       for name in prepared.sources}  # fmt: skip
            claim_run(folder, config)  # now that all of the data is known to be good
            with CheckpointStore(folder / CHECKPOINTS, config.checkpoint) as store:
                blueprint = make_blueprint(config)
                state = _restore_or_init(config, blueprint, mesh, store, batches)
                evaluation = jax.jit(make_evaluation_step(config, blueprint, mesh))
                state = _run(config, blueprint, mesh, folder, prepared, store, batches, state, evaluation, watched)
                whole = {name: heldout_batches(config, prepared, name) for name in prepared.sources}
                heldout_of = evaluate_each(evaluation, state, whole, mesh)
        model = with_values(blueprint.model, {**state.params, **state.balance})
        return TrainResult(model, state, folder, together(heldout_of), heldout_of, prepared)


def _restore_or_init(
    config: Config, blueprint: Blueprint, mesh: Mesh, store: CheckpointStore, batches: TrainBatches
) -> TrainState:
    whole = replicated(mesh)

    def init() -> TrainState:
        return init_state(config, blueprint)

    step = store.latest()
    if step is None:
        return jax.jit(init, out_shardings=whole)()
    about = store.about(step)
    if about["config"]["model"] != to_dict(config)["model"]:
        raise InputError(
            f"The checkpoint of step {step} in {config.run_dir} is of another architecture; choose another run_dir."
        )
    for key, value in environment().items():
        if about["environment"].get(key) != value:
            print(f"Going on with {key} {value!r}, where the run had {about['environment'].get(key)!r}: numbers will "
                  "differ in their last bits.")  # fmt: skip
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), jax.eval_shape(init))
    state = store.restore(step, abstract, batches)
    batches.check()  # before anything of the run is written
    return state


def _run(config: Config, blueprint: Blueprint, mesh: Mesh, folder: Path, prepared: Prepared, store: CheckpointStore,
         batches: TrainBatches, state: TrainState, evaluation: Any,
         watched: dict[str, list[Batch]]) -> TrainState:  # fmt: skip
    """Steps until the configured number is done, with a look at the `watched` held-out batches of each source."""
    options = config.train
    step = int(jax.device_get(state.step))
    train_step = jax.jit(make_train_step(config, blueprint, mesh), donate_argnums=0)
    report = ConsoleReport(
        steps=options.steps, start=step, log_every=options.log_every,
        flops_per_token=lambda step: training_flops_per_token(
            config.model, config.data.context_of(config.data.phase_at(step - 1))
        ),
        bytes_per_token=lambda step: batches.plan.phase_of_row((step - 1) * options.global_batch).bytes_per_token,
        devices=mesh.size, device_kind=jax.devices()[0].device_kind,
    )  # fmt: skip
    with report, JsonlTracker(folder / METRICS, step) as tracker:
        if step:
            report.say(f"Going on after step {step} of {options.steps}.")
        elif tracker.dropped:
            report.say(
                f"There is no checkpoint of the {tracker.dropped} steps in {METRICS}: starting again from step 0."
            )

        def settle(step: int, metrics: Any, heldout: dict[str, HeldoutLoss] | None = None) -> None:
            """Read a step's metrics, which waits for it, and note them."""
            row = {"step": step, **{name: value.tolist() for name, value in jax.device_get(metrics).items()}}
            if heldout is not None:
                row["heldout_loss"] = together(heldout).nats_per_token
                if len(heldout) > 1:
                    row["heldout_loss_of"] = {name: loss.nats_per_token for name, loss in heldout.items()}
            tracker.log(row)
            report.row(row)
            if row["skipped"] >= options.max_skipped_steps:
                raise RunStopped(
                    f"{row['skipped']} steps in a row, up to step {step}, had a loss or gradient that is not finite. "
                    "Nothing was learned from them; try a lower learning rate or train.compute_dtype=float32 "
                    "in a new run_dir."
                )

        pending: tuple[int, Any] | None = None  # the step that may still be running
        while step < options.steps:
            batch = _micro_batches(next(batches), options.micro_batches)
            batch = jax.device_put(batch, batch_sharding(mesh, leading=1))
            with jax.transfer_guard("disallow"):
                state, metrics = train_step(state, batch)
            step += 1
            if pending is not None:
                settle(*pending)
            pending = (step, metrics)
            last = step == options.steps
            looking, saving = step % config.evaluation.every == 0 or last, step % config.checkpoint.every == 0 or last
            if looking or saving:
                settle(step, metrics, evaluate_each(evaluation, state, watched, mesh) if looking else None)
                pending = None
            if looking:  # before the save: what a restart takes for done has its picture
                try:
                    plot_run(read_rows(folder / METRICS), folder / PICTURE)
                except OSError as error:  # a picture is not worth a checkpoint
                    report.say(f"{folder / PICTURE} cannot be written: {error}.")
            if saving:
                tracker.sync()
                store.save(step, state, batches, to_dict(config))
            if looking or saving:
                report.restart_clock()
    if not (folder / PICTURE).exists():  # a finished run whose picture was removed
        plot_run(read_rows(folder / METRICS), folder / PICTURE)
    return state


def _micro_batches(batch: Batch, count: int) -> Batch:
    """Each array [sequences, …] as [count, sequences / count, …]."""
    return {name: array.reshape(count, -1, *array.shape[1:]) for name, array in batch.items()}
