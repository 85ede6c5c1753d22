"""Open a `transformers` folder of either layout and check it before reading tensors."""

from itertools import islice
from pathlib import Path
from typing import NamedTuple

from zaya_jax.config import ModelConfig
from zaya_jax.errors import InputError
from zaya_jax.hf.config import from_hf
from zaya_jax.hf.legacy_config import from_legacy
from zaya_jax.hf.safetensors import TensorFile, read_header
from zaya_jax.hf.tensors import is_legacy, legacy_tensors, tensors
from zaya_jax.model.hf_names import HfTensor
from zaya_jax.run.files import expanded, read_object, require_existing

INDEX = "model.safetensors.index.json"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BLOCK = 2**26  # bytes compared at once


class Folder(NamedTuple):
    """A checked folder, whose tensors match its architecture."""

    path: Path
    config: ModelConfig
    legacy: bool  # whether it has the legacy layout of alternating layers (docs/reference.md §12.2)
    # The tensors of each parameter, or layer of one, by name and index in the stack, in order along the first axis.
    tensors: dict[tuple[str, int | None], list[HfTensor]]
    stored: dict[str, TensorFile]  # name → location in a file


def open_folder(folder: str | Path) -> Folder:
    """Read a folder's configuration and the headers of its files, without reading the tensors.

    `InputError` if a file is missing or damaged, an option is not supported, or a tensor is missing, unexpected, or has
    the wrong shape or an unsupported dtype.
    """
    folder = expanded(folder)
    require_existing(folder, f"The folder {folder}")
    tree = read_object(folder / "config.json")
    stored = _stored(folder)
    legacy = is_legacy(stored)
    layers = tree.get("num_hidden_layers")
    if type(layers) is int and layers > len(stored):  # checked first, to bound the memory for a hostile file
        problem = f"num_hidden_layers {layers}, but the folder has only {len(stored)} tensors"
        raise InputError(f"{folder / 'config.json'} has {problem}.")
    config = (from_legacy if legacy else from_hf)(tree, str(folder / "config.json"))
    # One more than stored is enough to detect a missing tensor, however many the configuration asks for.
    expected = tuple(islice((legacy_tensors if legacy else tensors)(config), len(stored) + 1))
    shapes = {tensor.name: tensor.shape for tensor in expected}
    if _HEAD in stored:  # a tied head can be stored redundantly
        shapes[_HEAD] = shapes[_EMBEDDING]
    for name, shape in shapes.items():
        if name not in stored:
            raise InputError(f"The tensor {name} is missing in {folder}.")
        if stored[name].shape != shape:
            differ = f"shape {list(stored[name].shape)}, but config.json requires {list(shape)}"
            raise InputError(f"The tensor {name} in {folder} has {differ}.")
    for name in stored:
        if name not in shapes:
            raise InputError(f"The tensor {name} in {folder} does not belong to this architecture.")
    if _HEAD in stored:
        _check_tied(folder, stored[_HEAD], stored[_EMBEDDING])
    by_parameter: dict[tuple[str, int | None], list[HfTensor]] = {}
    for tensor in expected:
        by_parameter.setdefault((tensor.leaf, tensor.group), []).append(tensor)
    return Folder(folder, config, legacy, by_parameter, stored)


def _check_tied(folder: Path, head: TensorFile, embedding: TensorFile) -> None:
    head_vd, embedding_vd = head.open(), embedding.open()
    rows = max(1, _BLOCK // max(1, head_vd[:1].nbytes))
    blocks = (slice(at, at + rows) for at in range(0, len(head_vd), rows))
    if head.dtype != embedding.dtype or any(head_vd[at].tobytes() != embedding_vd[at].tobytes() for at in blocks):
        raise InputError(f"The tensor {_HEAD} in {folder} differs from {_EMBEDDING}, but the head must be tied to it.")


def _stored(folder: Path) -> dict[str, TensorFile]:
    if not (folder / INDEX).exists():
        return read_header(folder / "model.safetensors")
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{folder / INDEX} has no weight_map.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors") or "\0" in file:
            entry = f"{name:.200} in {file!r:.200}"
            raise InputError(f"{folder / INDEX} places {entry}, which is not a file of that folder.")
    headers = {file: read_header(folder / file) for file in dict.fromkeys(weight_map.values())}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise InputError(f"The tensor {name:.200} is missing in {folder / file}, but {INDEX} places it there.")
    for name, file in ((name, file) for file, header in headers.items() for name in header):
        if weight_map.get(name) != file:
            raise InputError(f"The tensor {name} is in {folder / file}, but {INDEX} does not place it there.")
    return {name: headers[file][name] for name, file in weight_map.items()}
