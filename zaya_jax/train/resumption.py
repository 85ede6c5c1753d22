"""Resume a run from a checkpoint: the metadata that is saved, the checks, and the state that is restored."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.checkpoint.environment import environment, versions
from zaya_jax.checkpoint.restore import read_checkpoint, restore_newest
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import Config, from_dict, to_dict, to_yaml
from zaya_jax.config.checks import shown
from zaya_jax.config.stages import first_step, stage_at, tokens_before, total_steps
from zaya_jax.data.loading.batches import TrainBatches
from zaya_jax.errors import InputError, printable
from zaya_jax.job.multihost import is_primary
from zaya_jax.run.checkpoints import checkpoint_folder
from zaya_jax.run.digests import digest
from zaya_jax.run.manifest import Manifest
from zaya_jax.run.patience import PATIENCE, Patience
from zaya_jax.train.program import Programs
from zaya_jax.train.run_checks import OPTIMIZER_KEYS, check_architecture, check_past, check_values, warn_about_positions
from zaya_jax.train.spikes import empty_history
from zaya_jax.train.state import TrainState
from zaya_jax.weights.sources import PARAMETERS_ONLY, model_config


def checkpoint_metadata(
    config: Config, step: int, data: dict[str, Any], heldout_loss: float | None, first: int, kernels: str | None = None
) -> dict[str, Any]:
    """Make the metadata of a checkpoint after `step`, as a dict for JSON.

    `data` is the position in the data, `heldout_loss` in nats/token if it was evaluated, `first` the number of steps
    done before this run folder's first, and `kernels` the digest of `KernelSelection.table`.
    """
    stage = stage_at(config, step - 1)
    return {
        "phase": config.phases[stage.phase].name,
        "first_step": first,
        "batch": {"sequences": stage.sequences, "context": stage.context},
        "tokens_seen": tokens_before(config, step),
        "data": data,
        "heldout_loss": heldout_loss,
        "config": to_dict(config),
        "config_digest": digest(to_yaml(config).encode()),
        "environment": environment(kernels),
        "versions": versions(),
    }


def resume(
    config: Config, programs: Programs, store: CheckpointStore, batches: TrainBatches
) -> tuple[TrainState, Patience, int]:
    """Restore the newest intact checkpoint of the run, and set the position of `batches`.

    Returns the state, its record of held-out losses, and the number of steps done before this run folder's first.
    `InputError`, before anything is written, if the run cannot resume with `config`; `RunStopped` if no checkpoint is
    intact.
    """

    def prepare(manifest: Manifest) -> TrainState:
        metadata, step = manifest.metadata, manifest.step
        origin = f"The checkpoint at step {step} in {config.run_dir}"
        check_architecture(model_config(metadata), config.model, origin, "choose another run_dir")
        check_past(from_dict(metadata["config"]), config, step)
        batches.set_state(metadata["data"])
        return _abstract_state(programs, manifest)

    restored = restore_newest(store, prepare, print)
    if restored is None:
        raise InputError(f"None of the checkpoints in {config.run_dir} can be read. Choose another run_dir.")
    if restored.manifest.step < total_steps(config):
        store.take_over(restored.manifest.step)
    metadata = restored.manifest.metadata
    saved_on = metadata["environment"]
    for key, value in environment(programs.kernels.digest).items() if is_primary() else ():
        if saved_on.get(key) != value:
            saved = f"{key}={shown(saved_on.get(key))}. Results will not be bitwise identical."
            print(f"Resuming with {key}={shown(value)}; the checkpoint was saved with {saved}")
    first = metadata.get("first_step", first_step(config))
    return _with_history(config, restored.state), _patience(config, metadata), first


def resume_from(config: Config, programs: Programs, batches: TrainBatches) -> tuple[TrainState, Patience]:
    """Restore the full state of the run `resume_from` for a new run folder, and set the position of `batches`.

    Returns the state, and its record of held-out losses.
    `InputError` if there is no such checkpoint, or it does not fit `config`.
    """
    name, folder = f"resume_from={config.resume_from}", checkpoint_folder(config.resume_from or "", "resume_from")

    def prepare(manifest: Manifest) -> TrainState:
        metadata, step = manifest.metadata, manifest.step
        model = model_config(metadata)
        check_architecture(model, config.model, name, "leave out resume_from")
        if PARAMETERS_ONLY in metadata or "data" not in metadata:
            raise InputError(f"{name} contains parameters but no position in the data. Use init_from instead.")
        if metadata["config"].get("lora") is not None:
            problem = "contains adapters, which can resume only in the run_dir they were trained in"
            raise InputError(f"{name} {problem}. Merge them with export-hf, and set init_from to the exported folder.")
        # Besides phases and batches, the position in the data depends on seed and start_phase.
        check_values(config, metadata["config"], name, (*OPTIMIZER_KEYS, "seed", "start_phase"), "Set the same value")
        try:
            check_past(from_dict(metadata["config"]), config, step, rates=False)
            batches.set_state(metadata["data"])
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
        if step >= total_steps(config):
            advice = f"Raise phases.{config.phases[-1].name}.tokens, or append a phase."
            end = f"this configuration ends after step {total_steps(config)}"
            raise InputError(f"{name} is at step {step}, but {end}. {advice}")
        warn_about_positions(config, model, name, stage_at(config, step - 1).phase)
        return _abstract_state(programs, manifest)

    state, manifest = read_checkpoint(folder, prepare)
    if is_primary():
        print(printable(f"Resuming from {folder} after step {manifest.step} of {total_steps(config)}."))
    return _with_history(config, state), Patience()  # its own evaluations count


def _patience(config: Config, metadata: dict[str, Any]) -> Patience:
    """Return the record of a checkpoint, or an empty one if other held-out text is read since."""
    saved, current = metadata["config"].get("evaluation", {}), to_dict(config.evaluation)
    is_same = all(saved.get(key) == current[key] for key in ("batches", "batch_size"))
    return Patience(**metadata.get(PATIENCE, {})) if is_same else Patience()


def _abstract_state(programs: Programs, manifest: Manifest) -> TrainState:
    """Return the abstract state of the next step's phase, with a loss history of the size that was saved.

    `train.spike.window` may differ from the saved one; `_with_history` replaces the history after loading.
    """
    abstract = programs[stage_at(programs.config, manifest.step).phase].abstract_state
    window = manifest.leaves.get("recent.values", {"shape": abstract.recent.values.shape})["shape"][1]
    losses = jax.ShapeDtypeStruct((2, window), jnp.float32, sharding=abstract.recent.values.sharding)
    skipped = losses if "recent.skipped" in manifest.leaves else None
    return dataclasses.replace(abstract, recent=abstract.recent._replace(values=losses, skipped=skipped))


def _with_history(config: Config, state: TrainState) -> TrainState:
    """Empty a loss history of another window; add the skipped steps, which earlier versions did not save."""
    history, is_same = state.recent, state.recent.values.shape[1] == max(config.train.spike.window, 1)
    if is_same and history.skipped is not None:
        return state
    empty = jax.jit(lambda: empty_history(config.train.spike), out_shardings=history.values.sharding)()
    return dataclasses.replace(state, recent=history._replace(skipped=empty.skipped) if is_same else empty)
