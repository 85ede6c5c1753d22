"""Whole models from and to `transformers` ZAYA folders, as notebooks use them."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from zaya_jax.hf.exporter import Layout, read_arrays, write_folder
from zaya_jax.hf.folder import Folder, open_folder
from zaya_jax.hf.importer import read_parameters
from zaya_jax.model.tree import balancing_biases, parameters, with_values
from zaya_jax.model.zaya import Zaya


def load_pretrained(folder: str | Path, dtype: jax.typing.DTypeLike | None = jnp.float32) -> Zaya:
    """Read a model that `transformers` saved, or one in the legacy layout, onto this process's first device.

    Args:
      folder: holds `config.json` and `model.safetensors`, or its shards and their index.
      dtype: of the parameters; that of the folder where None. The balancing biases are fp32 whatever it is.

    Returns:
      The model; the first layer's router state scale, which the folder has none of, is one.

    Raises:
      InputError: see `open_folder`.
    """
    opened = open_folder(folder)
    empty = jax.eval_shape(functools.partial(Zaya, opened.config), jax.random.key(0))
    kinds = _stored_dtypes(opened) if dtype is None else {}
    usual = kinds["embedding"] if dtype is None else dtype  # also of γ, where its one layer is the first, without it
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    trained, balance = jax.eval_shape(parameters, empty), jax.eval_shape(balancing_biases, empty)
    abstract = {
        name: jax.ShapeDtypeStruct(x.shape, jnp.float32 if name in balance else kinds.get(name, usual), sharding=device)
        for name, x in {**trained, **balance}.items()
    }
    return with_values(empty, read_parameters(opened, abstract))


def save_pretrained(model: Zaya, folder: str | Path, layout: Layout = "hf") -> None:
    """Write `model` so that `transformers` loads it, in the dtype of its embedding.

    Raises:
      InputError: see `write_folder`; nothing is written then.
    """
    values = {**parameters(model), **balancing_biases(model)}
    write_folder(folder, model.config, read_arrays(values), model.dtype, layout)


def _stored_dtypes(folder: Folder) -> dict[str, jnp.dtype]:
    """The dtype of each parameter, one that holds those of all its layers."""
    found: dict[str, jnp.dtype] = {}
    for tensor in folder.tensors:
        kind = jnp.dtype(folder.stored[tensor.name].dtype)
        found[tensor.leaf] = jnp.promote_types(found.get(tensor.leaf, kind), kind)
    return found
