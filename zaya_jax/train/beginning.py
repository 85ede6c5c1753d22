"""The state a run begins or goes on with."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.checkpoint.environment import environment, versions
from zaya_jax.checkpoint.restore import read_checkpoint, restore_newest
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import Config, from_dict, to_dict, to_yaml
from zaya_jax.config.checks import shown
from zaya_jax.config.stages import first_step, stage_at, tokens_before, total_steps
from zaya_jax.data.pipeline import TrainBatches
from zaya_jax.errors import InputError
from zaya_jax.hf.interop import PARAMETERS_ALONE
from zaya_jax.parallel.mesh import replicated
from zaya_jax.parallel.multihost import is_primary
from zaya_jax.run.checkpoints import checkpoint_folder
from zaya_jax.run.digests import digest
from zaya_jax.run.manifest import Manifest
from zaya_jax.train.base import Base
from zaya_jax.train.given import (
    about_given,
    begin_with_given,
    check_architecture,
    check_given,
    parameters_alone,
    warn_about_positions,
)
from zaya_jax.train.program import Programs
from zaya_jax.train.run_checks import check_past
from zaya_jax.train.spikes import resize
from zaya_jax.train.state import TrainState, init_counters, init_state

# What the optimizer's state is shaped by, beside the architecture.
_STATE_KEYS = ("optimizer.matrices", "optimizer.muon.momentum_form", "optimizer.balance.rule")
# What a position in the data is counted by, beside phases and batches.
_POSITION_KEYS = ("seed", "start_phase")


def describe(
    config: Config, step: int, data: dict[str, Any], heldout_loss: float | None, first: int | None = None
) -> dict[str, Any]:
    """What a checkpoint after `step` steps says of itself; JSON.

    Args:
      config: of the run.
      step: steps done.
      data: position in the data.
      heldout_loss: nats/token after the step, where it was looked at.
      first: the step that this run folder begins after; `first_step(config)` where None.
    """
    stage = stage_at(config, step - 1)
    return {
        "phase": config.phases[stage.phase].name,
        "first_step": first_step(config) if first is None else first,
        "batch": {"sequences": stage.sequences, "context": stage.context},
        "tokens_seen": tokens_before(config, step),
        "data": data,
        "heldout_loss": heldout_loss,
        "config": to_dict(config),
        "config_digest": digest(to_yaml(config).encode()),
        "environment": environment(),
        "versions": versions(),
    }


def begin(config: Config, programs: Programs, base: Base) -> TrainState:
    """The state before the first step: drawn, or what `init_from` gives, or adapters of `base`.

    Raises:
      InputError: `init_from` cannot be begun with.
    """
    phase = stage_at(config, first_step(config)).phase
    program = programs[phase]
    abstract = program.abstract_state
    if config.init_from is None or config.lora is not None:
        placed = jax.tree.map(lambda x: x.sharding, abstract)
        state = jax.jit(lambda: init_state(program), out_shardings=placed)()
        if config.lora is None:
            return state
        warn_about_positions(config, about_given(config), f"init_from ({config.init_from})", phase)
        return dataclasses.replace(state, balance=base.balance)
    check_given(config)
    warn_about_positions(config, about_given(config), f"init_from ({config.init_from})", phase)
    if parameters_alone(config):
        return begin_with_given(config, program)

    def prepare(manifest: Manifest) -> TrainState:
        _check_same(config, manifest, "The checkpoint init_from", _STATE_KEYS,
                    "the optimizer's state does not fit. Set the same value, or export that run and set init_from to "
                    "the exported folder")  # fmt: skip
        return _as_saved(abstract, manifest)

    state = read_checkpoint(checkpoint_folder(config.init_from), prepare).state
    whole = replicated(program.placement.mesh)
    return dataclasses.replace(state, **jax.jit(lambda: init_counters(config), out_shardings=whole)())


def resume_from(config: Config, programs: Programs, batches: TrainBatches) -> TrainState:
    """The complete state of the run `resume_from`, for a new run folder, and `batches` at its position.

    Raises:
      InputError: there is no such state, or it does not fit `config`.
    """
    name, folder = f"resume_from={config.resume_from}", checkpoint_folder(config.resume_from or "", "resume_from")

    def prepare(manifest: Manifest) -> TrainState:
        about, step = manifest.metadata, manifest.step
        check_architecture(config, about, name, "choose another run")
        if PARAMETERS_ALONE in about or "data" not in about:
            raise InputError(f"{name} has parameters but no position in the data; use init_from instead.")
        if about["config"].get("lora") is not None:
            raise InputError(f"{name} holds adapters, which resume only in their own run_dir. Export that run, which "
                             "merges them, and set init_from to the exported folder.")  # fmt: skip
        _check_same(config, manifest, name, (*_STATE_KEYS, *_POSITION_KEYS), "set the same value")
        old = from_dict(about["config"])
        try:
            check_past(old, config, step, rates=False)
            batches.set_state(about["data"])
        except InputError as error:
            raise InputError(f"{name}: {error}") from error
        if step >= total_steps(config):
            raise InputError(f"{name} is at step {step}, and this configuration ends after step {total_steps(config)}; "
                             f"raise phases.{config.phases[-1].name}.tokens, or append a phase.")  # fmt: skip
        warn_about_positions(config, about, name, stage_at(config, step - 1).phase)
        return _as_saved(programs[stage_at(config, step).phase].abstract_state, manifest)

    state, manifest = read_checkpoint(folder, prepare)
    if is_primary():
        print(f"Resuming from {folder} after step {manifest.step} of {total_steps(config)}.")
    return _with_history(config, state)


def go_on(config: Config, programs: Programs, store: CheckpointStore, batches: TrainBatches) -> tuple[TrainState, int]:
    """The state of the newest checkpoint that is what was saved, and `batches` at its position.

    Returns:
      The state, and the step that this run folder begins after.

    Raises:
      InputError: the run cannot go on as `config` says; nothing is written.
      RunStopped: no checkpoint is what was saved.
    """

    def prepare(manifest: Manifest) -> TrainState:
        step = manifest.step
        where = f"The checkpoint of step {step} in {config.run_dir}"
        check_architecture(config, manifest.metadata, where, "choose another run_dir")
        check_past(from_dict(manifest.metadata["config"]), config, step)
        batches.set_state(manifest.metadata["data"])
        return _as_saved(programs[stage_at(config, step).phase].abstract_state, manifest)

    restored = restore_newest(store, prepare, print)
    if restored is None:
        raise InputError(f"{config.run_dir} holds checkpoints that cannot be read; choose another run_dir.")
    if restored.manifest.step < total_steps(config):
        store.take_over(restored.manifest.step)
    there = restored.manifest.metadata["environment"]
    for key, value in environment().items() if is_primary() else ():
        if there.get(key) != value:
            print(f"Going on with {key} {value!r}, where the run had {there.get(key)!r}: numbers will differ in their "
                  "last bits.")  # fmt: skip
    return _with_history(config, restored.state), restored.manifest.metadata.get("first_step", first_step(config))


def _check_same(config: Config, manifest: Manifest, what: str, keys: Sequence[str], otherwise: str) -> None:
    """Raise `InputError` where one of `keys` was another in the configuration that a checkpoint is of."""
    there, here = manifest.metadata["config"], to_dict(config)
    for key in keys:
        theirs, ours = _value(there, key), _value(here, key)
        if theirs != ours:
            raise InputError(f"{what} was made with {key}={shown(theirs)}, and here it is {shown(ours)}: {otherwise}.")


def _as_saved(abstract: TrainState, manifest: Manifest) -> TrainState:
    """`abstract` with the history of losses as a checkpoint has it: `train.spike.window` may have been another."""
    window = manifest.leaves.get("recent.values", {"shape": abstract.recent.values.shape})["shape"][1]
    history = abstract.recent._replace(
        values=jax.ShapeDtypeStruct((2, window), jnp.float32, sharding=abstract.recent.values.sharding),
        skipped=jax.ShapeDtypeStruct((2, window), jnp.float32, sharding=abstract.recent.values.sharding)
        if "recent.skipped" in manifest.leaves else None,
    )  # fmt: skip
    return dataclasses.replace(abstract, recent=history)


def _with_history(config: Config, state: TrainState) -> TrainState:
    """`state` with a history of losses of the configured window."""
    there, kept = state.recent, max(config.train.spike.window, 1)
    if there.skipped is not None and there.values.shape[1] == kept:
        return state
    resized = jax.jit(lambda recent: resize(config.train.spike, recent), out_shardings=there.values.sharding)(there)
    return dataclasses.replace(state, recent=resized)


def _value(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
