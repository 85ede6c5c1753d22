"""The parameters that `init_from` gives: of a run's checkpoint, or of a folder of `transformers`."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.checkpoint.inspection import open_checkpoint
from zaya_jax.checkpoint.restore import read_checkpoint
from zaya_jax.config import Config, ModelConfig, to_dict
from zaya_jax.config.schema import HF
from zaya_jax.errors import InputError
from zaya_jax.hf.folder import open_folder
from zaya_jax.hf.importer import read_parameters
from zaya_jax.hf.interop import PARAMETERS_ALONE
from zaya_jax.model.tree import Arrays
from zaya_jax.parallel.multihost import is_primary
from zaya_jax.run.checkpoints import checkpoint_folder
from zaya_jax.run.manifest import Manifest
from zaya_jax.train.program import PhaseProgram
from zaya_jax.train.state import TrainState, init_counters

# Of the architecture, what no parameter depends on: a longer context begins with the state of a shorter one.
FREE_SIZES = ("max_positions", "rope_base", "sliding_rope_base", "init_std")


def parameters_alone(config: Config) -> bool:
    """Whether `init_from` gives parameters and nothing of an optimizer."""
    return _is_folder(config) or PARAMETERS_ALONE in about_given(config)


def about_given(config: Config) -> dict[str, Any]:
    """What `init_from` says of itself: `config`, at least its section `model`.

    Of a folder, what is written in two ways but is one thing is written as `config` does: a pattern of layers, and a
    window where no layer slides.

    Raises:
      InputError: see `open_folder` and `checkpoint_folder`.
    """
    if not _is_folder(config):
        return open_checkpoint(checkpoint_folder(config.init_from or ""))[0].metadata
    there, here = open_folder(_path(config)).config, config.model
    if _layers(there) == _layers(here):
        there = replace(there, layer_pattern=here.layer_pattern)
    if "sliding" not in there.period:
        there = replace(there, sliding_window=here.sliding_window)
    return {"config": {"model": to_dict(there)}}


def check_given(config: Config) -> None:
    """Raise `InputError` where what `init_from` names is no start for `config`."""
    about = about_given(config)
    what = "The folder init_from" if _is_folder(config) else "The checkpoint init_from"
    check_architecture(config, about, what, "choose another one")
    if about["config"].get("lora") is not None:
        raise InputError(f"init_from is {config.init_from!r}, which holds adapters alone; export that run, which "
                         "merges them, and begin with what was exported.")  # fmt: skip


def check_architecture(config: Config, about: dict[str, Any], what: str, advice: str) -> None:
    """Raise `InputError` where `what`, of which `about` tells, is of another architecture than `config`."""
    there, here = about["config"]["model"], to_dict(config)["model"]
    for key, value in here.items():
        if key not in FREE_SIZES and there.get(key) != value:
            raise InputError(f"{what} is of another architecture: model.{key} is {there.get(key)!r} there and "
                             f"{value!r} here; {advice}.")  # fmt: skip


def warn_about_positions(config: Config, about: dict[str, Any], what: str, phase: int) -> None:
    """Print a warning where `what`, of which `about` tells, was trained with another base of the rotary embedding.

    Args:
      config: of the run.
      about: of a checkpoint, or of a folder of `transformers`, as `about_given` gives it.
      what: names it.
      phase: of `config`, which its parameters go into.
    """
    there, one = about["config"]["model"], config.phases[phase]
    its_phase = next((p for p in about["config"].get("phases", ()) if p["name"] == about.get("phase")), {})
    pairs = [("model.rope_base" if one.rope_base is None else f"phases.{one.name}.rope_base",
              its_phase.get("rope_base") or there["rope_base"], config.model_of(one).rope_base)]  # fmt: skip
    if "sliding" in config.model.period:
        pairs.append(("model.sliding_rope_base", there["sliding_rope_base"], config.model.sliding_rope_base))
    for key, theirs, ours in pairs:
        if theirs != ours and is_primary():
            print(f"Warning: {what} was trained with a RoPE base of {theirs:g}, and {key} is {ours:g} here, so its "
                  f"attention sees other positions. Set {key}={theirs:g}, unless you extend the context.")  # fmt: skip


def given_parameters(config: Config, params: Mapping[str, Any], balance: Mapping[str, Any]) -> tuple[Arrays, Arrays]:
    """The parameters and the balancing biases that `init_from` gives.

    Args:
      config: of the run; its architecture is theirs (`check_given`).
      params: shape, dtype and sharding of each parameter that is wanted.
      balance: those of each balancing bias.

    Raises:
      InputError: they cannot be read, are not what was saved, or are NaN or infinite somewhere.
    """
    if _is_folder(config):
        values = read_parameters(open_folder(_path(config)), {**params, **balance})
        return {name: values[name] for name in params}, {name: values[name] for name in balance}
    wanted = {"params": dict(params), "balance": dict(balance)}

    def as_saved(manifest: Manifest) -> Any:
        def one(kind: str, name: str, x: Any) -> jax.ShapeDtypeStruct:
            leaf = manifest.leaves.get(f"{kind}.{name}")
            return jax.ShapeDtypeStruct(x.shape, x.dtype if leaf is None else leaf["dtype"], sharding=x.sharding)

        return {kind: {name: one(kind, name, x) for name, x in tree.items()} for kind, tree in wanted.items()}

    found = read_checkpoint(checkpoint_folder(config.init_from or ""), as_saved, part=True).state
    placed = jax.tree.map(lambda x: x.sharding, wanted)

    def cast(tree: Any) -> Any:
        made = jax.tree.map(lambda x, w: x.astype(w.dtype), tree, wanted)
        return made, {name: jnp.isfinite(x).all() for part in made.values() for name, x in part.items()}

    found, finite = jax.jit(cast, out_shardings=(placed, None))(found)
    for name, good in jax.device_get(finite).items():
        if not good:
            raise InputError(f"init_from is {config.init_from!r}, whose parameter {name} has NaN or infinite values; "
                             "take an earlier checkpoint.")  # fmt: skip
    return found["params"], found["balance"]


def begin_with_given(config: Config, program: PhaseProgram) -> TrainState:
    """The state before the first step, with the parameters and balancing biases that `init_from` gives.

    Args:
      config: of the run.
      program: of the phase that the run begins with.

    Returns:
      A state whose optimizer and counters are fresh. Parameters go straight into their shards.
    """
    abstract = program.abstract_state
    params, balance = given_parameters(config, abstract.params, abstract.balance)

    def rest(params: Any, balance: Any) -> dict[str, Any]:
        return {"opt_state": program.optimizer.init(params), "balance_state": program.balancer.init(balance),
                **init_counters(config)}  # fmt: skip

    names = {one.name for one in fields(TrainState)} - {"params", "balance"}
    placed = {name: jax.tree.map(lambda x: x.sharding, getattr(abstract, name)) for name in names}
    return TrainState(params, balance, **jax.jit(rest, out_shardings=placed)(params, balance))


def _is_folder(config: Config) -> bool:
    return config.init_from is not None and config.init_from.startswith(HF)


def _path(config: Config) -> str:
    return (config.init_from or "").removeprefix(HF)


def _layers(config: ModelConfig) -> tuple[str, ...]:
    return config.period * config.num_groups
