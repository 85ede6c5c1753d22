"""The state a run begins or goes on with."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from zaya_jax.checkpoint.digest import digest
from zaya_jax.checkpoint.environment import environment, versions
from zaya_jax.checkpoint.folder import checkpoint_folder
from zaya_jax.checkpoint.interop import PARAMETERS_ALONE
from zaya_jax.checkpoint.manifest import Manifest
from zaya_jax.checkpoint.restore import read_checkpoint, restore_newest
from zaya_jax.checkpoint.store import CheckpointStore
from zaya_jax.config import Config, from_dict, to_dict, to_yaml
from zaya_jax.config.stages import first_step, stage_at, tokens_before, total_steps
from zaya_jax.data.pipeline import TrainBatches
from zaya_jax.errors import InputError
from zaya_jax.parallel.mesh import replicated
from zaya_jax.parallel.processes import is_first
from zaya_jax.train.compiled import abstract_state
from zaya_jax.train.from_folder import about_folder, begin_with_folder, is_folder, with_parameters
from zaya_jax.train.run_folder import check_past
from zaya_jax.train.state import TrainState, init_counters, init_state, make_blueprint, mesh_of

# Of the architecture, what no parameter depends on: a longer context begins with the state of a shorter one.
_FREE_SIZES = ("max_positions", "rope_base", "sliding_rope_base", "init_std")
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


def begin(config: Config) -> TrainState:
    """The state before the first step: drawn, a folder's parameters, or another run's with counters of its own.

    Raises:
      InputError: `init_from` cannot be begun with.
    """
    phase = stage_at(config, first_step(config)).phase
    abstract = abstract_state(config, phase)
    if config.init_from is None:
        placed = jax.tree.map(lambda x: x.sharding, abstract)
        return jax.jit(lambda: init_state(config, make_blueprint(config)), out_shardings=placed)()
    if is_folder(config.init_from):
        _check_architecture(config, about_folder(config)["config"], "The folder init_from", "choose another one")
        return begin_with_folder(config, abstract, phase)

    def prepare(manifest: Manifest) -> Any:
        there, here = manifest.about["config"], to_dict(config)
        _check_architecture(config, there, "The checkpoint init_from", "choose another one")
        if PARAMETERS_ALONE in manifest.about:
            return {kind: {name: jax.ShapeDtypeStruct(x.shape, manifest.leaves[f"{kind}.{name}"]["dtype"],
                                                      sharding=x.sharding) for name, x in arrays.items()}
                    for kind, arrays in (("params", abstract.params), ("balance", abstract.balance))}  # fmt: skip
        for key in _STATE_KEYS:
            theirs, ours = _value(there, key), _value(here, key)
            if theirs != ours:
                raise InputError(f"The checkpoint init_from was made with {key} {theirs!r}, and here it is {ours!r}: "
                                 "its optimizer's state cannot be gone on with. Take the same value.")  # fmt: skip
        return abstract

    state = read_checkpoint(checkpoint_folder(config.init_from), prepare).state
    if isinstance(state, dict):
        wanted = {**abstract.params, **abstract.balance}
        return with_parameters(config, abstract, phase, _cast({**state["params"], **state["balance"]}, wanted))
    whole = replicated(mesh_of(config, phase))
    return dataclasses.replace(state, **jax.jit(lambda: init_counters(config), out_shardings=whole)())


def go_on(config: Config, store: CheckpointStore, batches: TrainBatches) -> TrainState:
    """The state of the newest checkpoint that is what was saved, and `batches` at its position.

    Raises:
      InputError: the run cannot go on as `config` says; nothing is written.
      RunStopped: no checkpoint is what was saved.
    """

    def prepare(manifest: Manifest) -> TrainState:
        there, step = manifest.about["config"], manifest.step
        where = f"The checkpoint of step {step} in {config.run_dir}"
        _check_architecture(config, there, where, "choose another run_dir")
        check_past(from_dict(there), config, step)
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


def _cast(values: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    placed = {name: wanted[name].sharding for name in values}
    return jax.jit(lambda: {name: x.astype(wanted[name].dtype) for name, x in values.items()}, out_shardings=placed)()


def _value(tree: Any, key: str) -> Any:
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


def _check_architecture(config: Config, there: dict[str, Any], what: str, advice: str) -> None:
    for key, value in to_dict(config)["model"].items():
        if key not in _FREE_SIZES and there["model"].get(key) != value:
            raise InputError(f"{what} is of another architecture: model.{key} is {there['model'].get(key)!r} there "
                             f"and {value!r} here; {advice}.")  # fmt: skip
