"""The state a run begins or goes on with."""

import dataclasses
from typing import Any

import jax

from zaya_jax.checkpoint.digest import digest
from zaya_jax.checkpoint.environment import environment, versions
from zaya_jax.checkpoint.folder import checkpoint_folder
from zaya_jax.checkpoint.manifest import Manifest
from zaya_jax.checkpoint.restore import read_checkpoint, restore_newest
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import Config, from_dict, to_dict, to_yaml
from zaya_jax.config.stages import first_step, stage_at, tokens_before, total_steps
from zaya_jax.data.pipeline import TrainBatches
from zaya_jax.errors import InputError
from zaya_jax.parallel.mesh import replicated
from zaya_jax.parallel.processes import is_first
from zaya_jax.train.base import Base
from zaya_jax.train.compiled import abstract_state
from zaya_jax.train.given import begin_with_given, check_architecture, check_given, parameters_alone
from zaya_jax.train.run_folder import check_past
from zaya_jax.train.state import TrainState, init_counters, init_state, make_blueprint, mesh_of

# What the optimizer's state is shaped by, beside the architecture.
_STATE_KEYS = ("optimizer.matrices", "optimizer.muon.momentum_form", "optimizer.balance.rule", "train.spike.window")


def describe(config: Config, step: int, data: dict[str, Any], heldout_loss: float | None) -> dict[str, Any]:
    """What a checkpoint after `step` steps says of itself; JSON.

    Args:
      config: of the run.
      step: steps done.
      data: position in the data.
      heldout_loss: nats/token after the step, where it was looked at.
    """
    stage = stage_at(config, step - 1)
    return {
        "phase": config.phases[stage.phase].name,
        "batch": {"sequences": stage.sequences, "context": stage.context},
        "tokens_seen": tokens_before(config, step),
        "data": data,
        "heldout_loss": heldout_loss,
        "config": to_dict(config),
        "config_digest": digest(to_yaml(config).encode()),
        "environment": environment(),
        "versions": versions(),
    }


def begin(config: Config, base: Base) -> TrainState:
    """The state before the first step: drawn, or what `init_from` gives, or adapters of `base`.

    Raises:
      InputError: `init_from` cannot be begun with.
    """
    phase = stage_at(config, first_step(config)).phase
    abstract = abstract_state(config, phase)
    if config.init_from is None or config.lora is not None:
        placed = jax.tree.map(lambda x: x.sharding, abstract)
        state = jax.jit(lambda: init_state(config, make_blueprint(config)), out_shardings=placed)()
        return state if config.lora is None else dataclasses.replace(state, balance=base.balance)
    check_given(config)
    if parameters_alone(config):
        return begin_with_given(config, abstract, phase)

    def prepare(manifest: Manifest) -> TrainState:
        there, here = manifest.about["config"], to_dict(config)
        for key in _STATE_KEYS:
            theirs, ours = _value(there, key), _value(here, key)
            if theirs != ours:
                raise InputError(f"The checkpoint init_from was made with {key} {theirs!r}, and here it is {ours!r}: "
                                 "its optimizer's state cannot be gone on with. Take the same value, or export that "
                                 "run and begin with its parameters alone.")  # fmt: skip
        return abstract

    state = read_checkpoint(checkpoint_folder(config.init_from), prepare).state
    whole = replicated(mesh_of(config, phase))
    return dataclasses.replace(state, **jax.jit(lambda: init_counters(config), out_shardings=whole)())


def go_on(config: Config, store: CheckpointStore, batches: TrainBatches) -> TrainState:
    """The state of the newest checkpoint that is what was saved, and `batches` at its position.

    Raises:
      InputError: the run cannot go on as `config` says; nothing is written.
      RunStopped: no checkpoint is what was saved.
    """

    def prepare(manifest: Manifest) -> TrainState:
        step = manifest.step
        where = f"The checkpoint of step {step} in {config.run_dir}"
        check_architecture(config, manifest.about, where, "choose another run_dir")
        check_past(from_dict(manifest.about["config"]), config, step)
        batches.set_state(manifest.about["data"])
        return abstract_state(config, stage_at(config, step).phase)

    restored = restore_newest(store, prepare, print)
    if restored is None:
        raise InputError(f"{config.run_dir} holds checkpoints that cannot be read; choose another run_dir.")
    if restored.manifest.step < total_steps(config):
        store.take_over(restored.manifest.step)
    there = restored.manifest.about["environment"]
    for key, value in environment().items() if is_first() else ():
        if there.get(key) != value:
            print(f"Going on with {key} {value!r}, where the run had {there.get(key)!r}: numbers will differ in their "
                  "last bits.")  # fmt: skip
    return restored.state


def _value(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree
