"""The parameters that adapters are of: read where a run begins or goes on, never changed, in no checkpoint."""

import json
from pathlib import Path
from typing import NamedTuple

import jax

from zaya_jax.config import Config
from zaya_jax.errors import InputError
from zaya_jax.hf.adapters import BASE
from zaya_jax.model.fingerprint import fingerprint
from zaya_jax.model.tree import Arrays, balancing_biases
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.parallel.mesh import replicated
from zaya_jax.parallel.multihost import is_primary
from zaya_jax.run.files import write_atomically
from zaya_jax.train.given import check_given, given_parameters
from zaya_jax.train.program import PhaseProgram


class Base(NamedTuple):
    """A model that is not trained: its `params` in the compute dtype, and its balancing biases."""

    params: Arrays
    balance: Arrays


NO_BASE = Base({}, {})


def open_base(config: Config, program: PhaseProgram) -> Base:
    """The base that `config.init_from` names, placed as in a phase; `NO_BASE` where all parameters are trained.

    Raises:
      InputError: there is no such checkpoint or folder, it is of another architecture, or holds adapters itself.
    """
    if config.lora is None or config.init_from is None:
        return NO_BASE
    check_given(config)
    whole, dtype = replicated(program.placement.mesh), accumulation_dtype(config.train.compute_dtype)
    biases = jax.eval_shape(balancing_biases, program.model)
    balance = {name: jax.ShapeDtypeStruct(x.shape, dtype, sharding=whole) for name, x in biases.items()}
    return Base(*given_parameters(config, program.abstract_base, balance))


def note_base(folder: Path, config: Config, base: Base) -> None:
    """Write into a run's folder which base its adapters are of; nothing without adapters. All processes call it."""
    if config.lora is None:
        return
    digest = fingerprint({**base.params, **base.balance})  # a sum over the devices of all processes
    if is_primary():
        note = {"init_from": config.init_from, "fingerprint": digest}
        write_atomically(folder / BASE, json.dumps(note, indent=1) + "\n")


def check_base(folder: Path, config: Config, base: Base) -> None:
    """Raise `InputError` unless `base` is the one that the run in `folder` was begun with."""
    if config.lora is None:
        return
    try:
        then = json.loads((folder / BASE).read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{folder / BASE} cannot be read, so it is not known what the adapters of this run are of; "
                         "choose another run_dir.") from error  # fmt: skip
    if then != (now := fingerprint({**base.params, **base.balance})):
        raise InputError(f"init_from is {config.init_from!r}, whose parameters are not those that the adapters in "
                         f"{folder} were begun with (fingerprint {now}, then {then}). If that run has gone on since, "
                         "put its checkpoint back; otherwise choose another run_dir.")  # fmt: skip
