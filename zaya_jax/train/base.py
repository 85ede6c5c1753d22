"""The parameters that adapters are of: read where a run begins or goes on, never changed, in no checkpoint."""

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from zaya_jax.checkpoint.store import about_checkpoint, read_part
from zaya_jax.config import Config, to_dict
from zaya_jax.data.files import write_atomically
from zaya_jax.errors import InputError
from zaya_jax.model.tree import Arrays, balancing_biases, compute_dtypes, shapes
from zaya_jax.ops.precision import wide
from zaya_jax.parallel.mesh import replicated
from zaya_jax.train.state import Blueprint, layout_of, make_blueprint, mesh_of

NOTE = "base.json"  # of a run with adapters: what they are of
# Of the architecture, what no parameter depends on: a longer context begins with the state of a shorter one.
FREE_SIZES = ("max_positions", "rope_base", "sliding_rope_base", "init_std")


class Base(NamedTuple):
    """A model that is not trained: its `params` in the compute dtype, and its balancing biases."""

    params: Arrays
    balance: Arrays


NO_BASE = Base({}, {})


def frozen_shapes(config: Config, blueprint: Blueprint) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and dtype of each parameter that stands under adapters; {} where all parameters are trained."""
    if config.lora is None:
        return {}
    dtypes = compute_dtypes(blueprint.roles, config.train.compute_dtype)
    return {name: jax.ShapeDtypeStruct(shape, dtypes[name]) for name, shape in shapes(blueprint.model).items()}


def abstract_base(config: Config, phase: int) -> dict[str, jax.ShapeDtypeStruct]:
    """`frozen_shapes`, placed as in a phase."""
    blueprint = make_blueprint(config, phase)
    found = frozen_shapes(config, blueprint)
    shardings = layout_of(config, blueprint, mesh_of(config, phase)).shardings(found)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), found, shardings)


def open_base(config: Config, phase: int) -> Base:
    """The base that `config.init_from` names, placed as in a phase; `NO_BASE` where all parameters are trained.

    Raises:
      InputError: there is no such checkpoint, it is of another architecture, or holds adapters itself.
    """
    if config.lora is None or config.init_from is None:
        return NO_BASE
    check_beginning(config, about_checkpoint(config.init_from))
    whole, dtype = replicated(mesh_of(config, phase)), wide(config.train.compute_dtype)
    biases = jax.eval_shape(balancing_biases, make_blueprint(config, phase).model)
    balance = {name: jax.ShapeDtypeStruct(x.shape, dtype, sharding=whole) for name, x in biases.items()}
    found = read_part(config.init_from, {"params": abstract_base(config, phase), "balance": balance})
    return Base(found["params"], found["balance"])


def check_beginning(config: Config, about: dict[str, Any]) -> None:
    """Raise `InputError` where the checkpoint init_from, of which `about` tells, is no start for `config`."""
    check_architecture(config, about, "The checkpoint init_from", "choose another one")
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


def note_base(folder: Path, config: Config, base: Base) -> None:
    """Write into a run's folder which base its adapters are of; nothing where there is none."""
    if config.lora is not None:
        note = {"init_from": config.init_from, "fingerprint": fingerprint(base)}
        write_atomically(folder / NOTE, json.dumps(note, indent=1) + "\n")


def check_base(folder: Path, config: Config, base: Base) -> None:
    """Raise `InputError` unless `base` is the one that the run in `folder` was begun with."""
    if config.lora is None:
        return
    try:
        then = json.loads((folder / NOTE).read_text(encoding="utf-8"))["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder / NOTE} cannot be read, so it is not known what the adapters of this run are of; "
                         "choose another run_dir.") from error  # fmt: skip
    if then != (now := fingerprint(base)):
        raise InputError(f"init_from is {config.init_from!r}, whose parameters are not those that the adapters in "
                         f"{folder} were begun with (fingerprint {now}, then {then}). If that run has gone on since, "
                         "put its checkpoint back; otherwise choose another run_dir.")  # fmt: skip


def fingerprint(base: Base) -> str:
    """A digest of all bits of a base, the same wherever its parameters lie.

    Of each array a sum over its elements of bits times a number that depends on their place, in whole numbers: these
    add up to the same in any order. It tells a mistake, not a forger.
    """
    found = jax.device_get(_sums({**base.params, **base.balance}))
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(f"{name} {found[name].tolist()}\n".encode())
    return digest.hexdigest()[:32]


@jax.jit
def _sums(arrays: Arrays) -> Arrays:
    return {name: jnp.stack([_sum(x, 1), _sum(x, 2)]) for name, x in arrays.items()}


def _sum(x: jax.Array, seed: int) -> jax.Array:
    kinds = {2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}
    bits = jax.lax.bitcast_convert_type(x, kinds[x.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.full(bits.shape, seed * 0x9E3779B9 & 0xFFFFFFFF, jnp.uint32)
    for axis in range(bits.ndim):  # the finalizer of MurmurHash3, over one index after another
        place = place * jnp.uint32(0x01000193) + jax.lax.broadcasted_iota(jnp.uint32, bits.shape, axis)
        place = (place ^ (place >> 16)) * jnp.uint32(0x85EBCA6B)
        place = (place ^ (place >> 13)) * jnp.uint32(0xC2B2AE35)
    return jnp.sum((bits + 1) * (place | 1), dtype=jnp.uint32)
