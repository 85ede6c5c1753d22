"""Parameters of a checkpoint layer by layer, those of a run of adapters merged with what they are of."""

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.checkpoint.inspection import open_checkpoint
from zaya_jax.config import LoraConfig, ModelConfig
from zaya_jax.config.schema import HF
from zaya_jax.errors import InputError
from zaya_jax.hf.folder import open_folder
from zaya_jax.hf.tensors import is_bias
from zaya_jax.model.fingerprint import combine_sums, part_sums
from zaya_jax.model.lora import ADAPTED, Adapted, adapter_names, merge
from zaya_jax.model.router import INERT
from zaya_jax.model.tree import compute_dtypes, roles, shapes
from zaya_jax.model.zaya import Zaya
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.run.checkpoints import checkpoint_folder
from zaya_jax.run.files import read_json
from zaya_jax.run.manifest import Damaged

Read = Callable[[str, int | None], np.ndarray]  # of a parameter's name and the index in its stack
BASE = "base.json"  # of a run with adapters: what they are of


def read_saved(folder: Path) -> Read:
    """The parameters and balancing biases of a checkpoint, as they were saved."""
    manifest, reader = open_checkpoint(folder)
    names = {name.partition(".")[2]: name for name in manifest.leaves if name.startswith(("params.", "balance."))}

    def read(name: str, group: int | None) -> np.ndarray:
        try:
            return reader.read(names[name], () if group is None else (group,))
        except Damaged as error:
            raise InputError(str(error)) from error

    return read


def read_folder(path: str) -> Read:
    """Those of a folder of `transformers`, as they are stored."""
    folder = open_folder(path)
    tensors: dict[tuple[str, int | None], list[Any]] = {}
    for tensor in folder.tensors:
        tensors.setdefault((tensor.leaf, tensor.group), []).append(tensor)

    def read(name: str, group: int | None) -> np.ndarray:
        if (name, group) == (INERT, 0):  # inert, and in no folder
            return np.ones(folder.config.router_size, np.float32)
        found = [(one.part, one.to_ours(folder.stored[one.name].open())) for one in tensors[name, group]]
        if found[0][0] is None:
            return found[0][1]
        whole = np.empty((max(part.stop for part, _ in found), *found[0][1].shape[1:]), found[0][1].dtype)
        for part, value in found:
            whole[part] = value
        return whole

    return read


def read_base(folder: Path, about: Mapping[str, Any], model: ModelConfig, base: str | None) -> Read:
    """Parameters that the adapters in a checkpoint are of, in the dtype they were trained in.

    Args:
      folder: of the checkpoint.
      about: what it says of itself.
      model: the architecture.
      base: what the adapters are of; `init_from` of the run where None.

    Raises:
      InputError: the base cannot be read, or is not the one that the run was begun with.
    """
    where = base or about["config"]["init_from"]
    read = read_folder(where.removeprefix(HF)) if where.startswith(HF) else read_saved(checkpoint_folder(where))
    abstract = abstract_model(model)
    dtypes = compute_dtypes(roles(abstract), about["config"]["train"]["compute_dtype"])
    exact = accumulation_dtype(about["config"]["train"]["compute_dtype"])

    def frozen(name: str, group: int | None) -> np.ndarray:
        return read(name, group).astype(dtypes.get(name, exact))

    _check_base(folder, where, frozen, {**shapes(abstract), **bias_shapes(model)})
    return frozen


def read_merged(folder: Path, about: Mapping[str, Any], model: ModelConfig, adapters: Read, base: str | None) -> Read:
    """Those of a run of adapters: each matrix with its adapters added, in the dtype it was trained in.

    Args:
      folder: see `read_base`.
      about: see `read_base`.
      model: the architecture.
      adapters: `read_saved` of the checkpoint.
      base: see `read_base`, which also says what is raised.
    """
    frozen, kinds = read_base(folder, about, model, base), roles(abstract_model(model))
    scale = LoraConfig(**about["config"]["lora"]).scale

    def merged(name: str, group: int | None) -> np.ndarray:
        if is_bias(name):  # the load may have moved it
            return adapters(name, group)
        if kinds[name] not in ADAPTED:
            return frozen(name, group)
        a, b = (adapters(one, group) for one in adapter_names(name))
        return _merge(frozen(name, group), a, b, scale)

    return merged


def abstract_model(model: ModelConfig) -> Zaya:
    """A model of shapes."""
    return jax.eval_shape(functools.partial(Zaya, model), jax.random.key(0))


def _merge(base: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    """One expert at a time: the sums of a whole layer in fp32 would take more than the layer."""
    if base.ndim > 2:
        return np.stack([_merge(*one, scale) for one in zip(base, a, b, strict=True)])
    return np.asarray(merge(Adapted(jnp.asarray(base), jnp.asarray(a), jnp.asarray(b), scale)))


def bias_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each balancing bias by name."""
    return {f"blocks.{position}.mixture.router.balancing_bias": (model.num_groups, model.num_experts + 1)
            for position in range(len(model.period))}  # fmt: skip


def base_fingerprint(folder: Path) -> str:
    """The fingerprint of what the adapters in a checkpoint are of, as its run noted it."""
    note = folder.parent.parent / BASE
    try:
        return read_json(note)["fingerprint"]
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{note} cannot be read, so it is not known what the adapters in {folder} are of.") from error


def _check_base(folder: Path, where: str, frozen: Read, sizes: Mapping[str, tuple[int, ...]]) -> None:
    then, sums = base_fingerprint(folder), {}
    for name, shape in sizes.items():
        if name.startswith("blocks."):
            sums[name] = part_sums((group, frozen(name, group)[None]) for group in range(shape[0]))
        else:
            sums[name] = part_sums([(0, frozen(name, None))])
    if then != (now := combine_sums(sums)):
        raise InputError(f"{where} is not what the adapters in {folder} were begun with (fingerprint {now}, then "
                         f"{then}); name that with --base.")  # fmt: skip
