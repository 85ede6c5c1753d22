"""Models from and to `transformers` ZAYA folders: `config.json` and safetensors."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes  # numpy's bfloat16; jax itself depends on it
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from zaya_jax.checkpoint.hf_config import from_hf, to_hf
from zaya_jax.checkpoint.hf_names import Tensor, tensors
from zaya_jax.config import ModelConfig
from zaya_jax.errors import InputError
from zaya_jax.model.layers import BalancingBias
from zaya_jax.model.zaya import Zaya

_SHARD_BYTES = 5 * 10**9
_INDEX = "model.safetensors.index.json"


def load_pretrained(folder: str | Path, dtype: jax.typing.DTypeLike = jnp.float32) -> Zaya:
    """Read a model that `transformers` saved.

    Args:
      folder: holds `config.json` and `model.safetensors`, or its shards and their index.
      dtype: of the parameters; the balancing biases are fp32 whatever it is.

    Returns:
      The model; the first layer's router state scale, which the folder has none of, is one.

    Raises:
      InputError: a file is missing or damaged, an option is not supported, or a tensor is missing, extra
        or misshapen; the file or tensor is named.
    """
    folder = Path(folder)
    config = from_hf(_read_json(folder / "config.json"), str(folder / "config.json"))
    homes = _tensor_homes(folder)
    expected = list(tensors(config))
    names = {tensor.name for tensor in expected} | {"lm_head.weight"}  # a tied head may be stored again
    for tensor in expected:
        if tensor.name not in homes:
            raise InputError(f"The tensor {tensor.name} is missing in {folder}.")
    for name in homes:
        if name not in names:
            raise InputError(f"The tensor {name} in {folder} belongs to no parameter of this architecture.")
    files = {path: _open(path) for path in dict.fromkeys(homes.values())}
    for tensor in expected:
        shape = tuple(files[homes[tensor.name]].get_slice(tensor.name).get_shape())
        if shape != tensor.shape:
            raise InputError(f"The tensor {tensor.name} in {folder} has the shape {list(shape)}, but the "
                             f"configuration makes it {list(tensor.shape)}.")  # fmt: skip
    model = _empty(config, jnp.dtype(dtype))
    for tensor in expected:
        stored = files[homes[tensor.name]].get_tensor(tensor.name)
        array = _parameter(model, tensor)
        array[_place(tensor)] = tensor.to_ours(stored).astype(array.dtype)
    return jax.tree.map(jnp.asarray, model)


def save_pretrained(model: Zaya, folder: str | Path) -> None:
    """Write `model` so that `transformers` loads it, in the dtype its parameters have.

    Raises:
      InputError: `folder` exists and is not empty, or `transformers` has no form of the architecture; nothing
        is written then.
    """
    described = to_hf(model.config, model.dtype.name)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder; a model is saved into a new one.")
    folder.mkdir(parents=True, exist_ok=True)
    host = jax.tree.map(np.asarray, jax.device_get(model))
    rows = list(tensors(model.config))
    shards: list[list[Tensor]] = [[]]
    size = 0
    for tensor in rows:
        bytes_ = int(np.prod(tensor.shape)) * _parameter(host, tensor).dtype.itemsize
        if shards[-1] and size + bytes_ > _SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += bytes_
    index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        content = {t.name: np.ascontiguousarray(t.to_theirs(_parameter(host, t)[_place(t)])) for t in shard}
        save_file(content, folder / name, metadata={"format": "pt"})
        index["metadata"]["total_size"] += sum(array.nbytes for array in content.values())
        index["weight_map"].update(dict.fromkeys(content, name))
    if len(shards) > 1:
        (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n")
    (folder / "config.json").write_text(json.dumps(described, indent=2) + "\n")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}.") from error
    if not isinstance(tree, dict):
        raise InputError(f"{path} holds no JSON object.")
    return tree


def _tensor_homes(folder: Path) -> dict[str, Path]:
    """The file of each tensor."""
    if not (folder / _INDEX).exists():
        path = folder / "model.safetensors"
        return dict.fromkeys(_open(path).keys(), path)
    homes = {}
    weight_map = _read_json(folder / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{folder / _INDEX} has no weight_map.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise InputError(f"{folder / _INDEX} places {name} in {file!r}, which is not a file of that folder.")
        homes[name] = folder / file
    for path in dict.fromkeys(homes.values()):
        stored = set(_open(path).keys())
        for name, home in homes.items():
            if home == path and name not in stored:
                raise InputError(f"The tensor {name} is missing in {path}, where {_INDEX} places it.")
    return homes


def _open(path: Path) -> Any:
    if not path.exists():
        raise InputError(f"{path} is missing.")
    try:
        return safe_open(path, framework="np")
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is not a whole safetensors file: {error}.") from error


def _empty(config: ModelConfig, dtype: np.dtype) -> Zaya:
    """A model of host arrays, ones throughout, in `dtype` where it is trained by the loss."""
    shapes = jax.eval_shape(functools.partial(Zaya, config), jax.random.key(0))

    def fill(variable: nnx.Variable) -> nnx.Variable:
        kind = np.dtype(np.float32) if isinstance(variable, BalancingBias) else dtype
        return variable.replace(np.ones(variable.shape, ml_dtypes.bfloat16 if kind == jnp.bfloat16 else kind))

    return jax.tree.map(fill, shapes, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _parameter(model: Zaya, tensor: Tensor) -> np.ndarray:
    home: Any = model
    for step in tensor.path:
        home = home[step] if isinstance(step, int) else getattr(home, step)
    return home[...]


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """The index in the parameter of what the tensor holds."""
    group = () if tensor.group is None else (tensor.group,)
    return (*group, tensor.part if tensor.part is not None else Ellipsis)
