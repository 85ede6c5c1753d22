"""Initialize the training state: from the seed, from `init_from`, or as adapters on frozen parameters."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax

from zaya_jax.config import Config
from zaya_jax.config.stages import first_step, stage_at
from zaya_jax.errors import InputError
from zaya_jax.job.multihost import is_primary
from zaya_jax.model.fingerprint import fingerprint
from zaya_jax.model.tree import Arrays, balancing_biases
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.ops.target import current_target
from zaya_jax.parallel.mesh import replicated
from zaya_jax.train.program import COMPILED_QUICKLY, PhaseProgram, known_options
from zaya_jax.train.run_checks import OPTIMIZER_KEYS, check_architecture, check_values, warn_about_positions
from zaya_jax.train.state import TrainState, init_counters, init_state
from zaya_jax.weights.load import open_weights, read_base_fingerprint, write_base_note
from zaya_jax.weights.sources import Weights


class FrozenBase(NamedTuple):
    """The frozen model under adapters. It is never part of the run's checkpoints."""

    params: Arrays  # parameters by name, in the compute dtype
    balance: Arrays  # balancing biases by name, fp32


NO_BASE = FrozenBase({}, {})


def open_init_from(config: Config) -> Weights | None:
    """Open the weights of `init_from`, if any; InputError if that fails, or for another architecture or adapters."""
    if config.init_from is None:
        return None
    weights, name = open_weights(config.init_from, "init_from"), f"init_from={config.init_from}"
    check_architecture(weights.config, config.model, name, "leave out init_from")
    if weights.holds_adapters:
        advice = "Merge them with export-hf, and set init_from to the exported folder."
        raise InputError(f"{name} contains adapters. {advice}")
    return weights


def initialize(program: PhaseProgram, weights: Weights | None = None, base: FrozenBase = NO_BASE) -> TrainState:
    """Make the state before the first step, sharded for the phase of `program`, in which the run starts.

    Parameters, balancing biases and, if saved, the optimizer state are those of `weights` (`init_from`), or drawn from
    the seed. Adapters are drawn, and their balancing biases are those of `base`. `InputError` if the optimizer state
    does not fit, or the weights are damaged.
    """
    config, abstract = program.config, program.abstract_state
    if weights is not None:
        phase = stage_at(config, first_step(config)).phase
        warn_about_positions(config, weights.config, f"init_from ({config.init_from})", phase)
    if weights is None or config.lora is not None:
        placed = jax.tree.map(lambda x: x.sharding, abstract)
        options = known_options(COMPILED_QUICKLY) if current_target().platform == "cpu" else None
        state = jax.jit(lambda: init_state(program), out_shardings=placed, compiler_options=options)()
        return state if config.lora is None else dataclasses.replace(state, balance=base.balance)
    if weights.optimizer_config is not None:
        name, advice = f"init_from={config.init_from}", "export that run and set init_from to the exported folder"
        advice = f"The optimizer state does not fit. Set the same value, or {advice}"
        check_values(config, weights.optimizer_config, name, OPTIMIZER_KEYS, advice)
    kinds = ("params", "balance", "opt_state", "balance_state")
    learned = weights.load_state({kind: getattr(abstract, kind) for kind in kinds})
    names = [field.name for field in dataclasses.fields(TrainState) if field.name not in learned]

    def rest(params: Arrays, balance: Arrays) -> dict[str, Any]:
        fresh = {"opt_state": program.optimizer.init(params), "balance_state": program.balancer.init(balance)}
        fresh |= init_counters(config)
        return {name: fresh[name] for name in names}

    placed = {name: jax.tree.map(lambda x: x.sharding, getattr(abstract, name)) for name in names}
    return TrainState(**learned, **jax.jit(rest, out_shardings=placed)(learned["params"], learned["balance"]))


def load_frozen_base(program: PhaseProgram, weights: Weights | None) -> FrozenBase:
    """Load the frozen model under adapters, sharded for the phase; `NO_BASE` without adapters."""
    config = program.config
    if config.lora is None or weights is None:
        return NO_BASE
    sharding, dtype = replicated(program.placement.mesh), accumulation_dtype(config.train.compute_dtype)
    biases = jax.eval_shape(balancing_biases, program.model)
    balance = {name: jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding) for name, x in biases.items()}
    values = weights.load({**program.abstract_base, **balance})
    return FrozenBase(*({name: values[name] for name in kind} for kind in (program.abstract_base, balance)))


def check_base(folder: Path, config: Config, base: FrozenBase, *, is_new: bool) -> None:
    """Raise `InputError` if `base` is not the frozen model under the adapters of the run in `folder`.

    A new run records it. All processes call this.
    """
    if config.lora is None:
        return
    now = fingerprint({**base.params, **base.balance})  # sums over all devices, so every process must take part
    if is_new:
        if is_primary():
            write_base_note(folder, config.init_from, now)
    elif (before := read_base_fingerprint(folder)) != now:
        advice = "If that run has continued since, restore its earlier checkpoint; otherwise choose another run_dir."
        raise InputError(
            f"The parameters of init_from={config.init_from} are not the ones that the adapters in {folder} were "
            f"trained on (fingerprint {now}, not {before}). {advice}"
        )
