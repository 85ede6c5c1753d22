"""A state that begins with the parameters of a folder of `transformers`."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import jax

from zaya_jax.checkpoint.hf_folder import open_folder
from zaya_jax.checkpoint.hf_import import read_parameters
from zaya_jax.config import Config, ModelConfig, to_dict
from zaya_jax.config.schema import HF
from zaya_jax.train.state import TrainState, init_counters, make_blueprint


def is_folder(init_from: str | None) -> bool:
    """Whether `init_from` names a folder of `transformers`."""
    return init_from is not None and init_from.startswith(HF)


def about_folder(config: Config) -> dict[str, Any]:
    """The architecture in the folder `init_from`, in the form a checkpoint has of its configuration.

    What is written in two ways but is one thing is written as `config` does: a pattern of layers, and a window where
    no layer slides.

    Raises:
      InputError: see `open_folder`.
    """
    there, here = open_folder(_path(config)).config, config.model
    if _layers(there) == _layers(here):
        there = replace(there, layer_pattern=here.layer_pattern)
    if "sliding" not in there.period:
        there = replace(there, sliding_window=here.sliding_window)
    return {"config": {"model": to_dict(there)}}


def begin_with_folder(config: Config, abstract: TrainState, phase: int) -> TrainState:
    """The state before the first step, with the parameters and balancing biases of the folder `init_from`.

    Args:
      config: of the run; its architecture is the folder's.
      abstract: shapes, dtypes and shardings of the state.
      phase: the one the run begins with.

    Returns:
      A state whose optimizer and counters are fresh. Parameters go straight into their shards.
    """
    wanted: Any = {**abstract.params, **abstract.balance}
    return with_parameters(config, abstract, phase, read_parameters(open_folder(_path(config)), wanted))


def with_parameters(config: Config, abstract: TrainState, phase: int, values: Mapping[str, Any]) -> TrainState:
    """A state of these parameters and balancing biases, whose optimizer and counters are fresh."""
    params = {name: values[name] for name in abstract.params}
    balance = {name: values[name] for name in abstract.balance}
    blueprint = make_blueprint(config, phase)

    def rest(params: Any, balance: Any) -> dict[str, Any]:
        return {"opt_state": blueprint.optimizer.init(params), "balance_state": blueprint.balancer.init(balance),
                **init_counters(config)}  # fmt: skip

    names = {one.name for one in fields(TrainState)} - {"params", "balance"}
    placed = {name: jax.tree.map(lambda x: x.sharding, getattr(abstract, name)) for name in names}
    return TrainState(params, balance, **jax.jit(rest, out_shardings=placed)(params, balance))


def _path(config: Config) -> str:
    return (config.init_from or "").removeprefix(HF)


def _layers(config: ModelConfig) -> tuple[str, ...]:
    return config.period * config.num_groups
