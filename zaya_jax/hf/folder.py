"""A folder of `transformers`, either layout: what it holds, checked before any of it is read."""

from itertools import islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.errors import InputError
from zaya_jax.hf.config import from_hf
from zaya_jax.hf.legacy import is_legacy, legacy_tensors
from zaya_jax.hf.legacy_config import from_legacy
from zaya_jax.hf.safetensors import Stored, read_header
from zaya_jax.hf.tensors import Tensor, tensors
from zaya_jax.run.files import read_object

INDEX = "model.safetensors.index.json"
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_BLOCK = 2**26  # bytes compared at once


class Folder(NamedTuple):
    """A folder whose tensors are those of its architecture."""

    path: Path
    config: ModelConfig  # the architecture its `config.json` describes
    legacy: bool  # whether it is of alternating layers (zaya1.md §12.2)
    tensors: tuple[Tensor, ...]  # what it holds and where that belongs
    stored: dict[str, Stored]  # by name, where each is


def open_folder(folder: str | Path) -> Folder:
    """Look at a folder: its configuration and the headers of its files, in memory independent of its size.

    Raises:
      InputError: a file is missing or damaged, an option is not supported, or a tensor is missing, extra, misshapen or
        of a dtype that parameters do not have; the file or tensor is named.
    """
    folder = Path(folder).expanduser()
    tree = read_object(folder / "config.json")
    stored = _stored(folder)
    legacy = is_legacy(stored)
    layers = tree.get("num_hidden_layers")
    if type(layers) is int and layers > len(stored):  # a layer has several; checked before lists of layers are made
        raise InputError(f"{folder / 'config.json'} has num_hidden_layers {layers}, but the folder's files hold only "
                         f"{len(stored)} tensors.")  # fmt: skip
    config = (from_legacy if legacy else from_hf)(tree, str(folder / "config.json"))
    # One more than are stored is enough to know that one is missing, however many a configuration asks for.
    expected = tuple(islice((legacy_tensors if legacy else tensors)(config), len(stored) + 1))
    for tensor in expected:
        if tensor.name not in stored:
            raise InputError(f"The tensor {tensor.name} is missing in {folder}.")
        _check_shape(folder, tensor.name, stored[tensor.name], tensor.shape)
    names = {tensor.name for tensor in expected} | {_HEAD}  # a tied head may be stored again
    for name in stored:
        if name not in names:
            raise InputError(f"The tensor {name} in {folder} belongs to no parameter of this architecture.")
    if _HEAD in stored:
        _check_shape(folder, _HEAD, stored[_HEAD], stored[_EMBEDDING].shape)
        _check_tied(folder, stored[_HEAD], stored[_EMBEDDING])
    return Folder(folder, config, legacy, expected, stored)


def _check_shape(folder: Path, name: str, stored: Stored, shape: tuple[int, ...]) -> None:
    if stored.shape != shape:
        raise InputError(f"The tensor {name} in {folder} has the shape {list(stored.shape)}, but the configuration "
                         f"makes it {list(shape)}.")  # fmt: skip


def _check_tied(folder: Path, head: Stored, embedding: Stored) -> None:
    head_vd, embedding_vd = head.open(), embedding.open()
    rows = max(1, _BLOCK // max(1, head_vd[:1].nbytes))
    same = head.dtype == embedding.dtype and all(
        np.array_equal(head_vd[at : at + rows].view(np.uint8), embedding_vd[at : at + rows].view(np.uint8))
        for at in range(0, len(head_vd), rows)
    )
    if not same:
        raise InputError(f"The tensor {_HEAD} in {folder} is another than {_EMBEDDING}, but the head is tied to it.")


def _stored(folder: Path) -> dict[str, Stored]:
    """Where each tensor is."""
    if not (folder / INDEX).exists():
        return read_header(folder / "model.safetensors")
    weight_map = read_object(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise InputError(f"{folder / INDEX} has no weight_map.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or not file.endswith(".safetensors") or "\0" in file:
            raise InputError(f"{folder / INDEX} places {name:.200} in {file!r:.200}, which is not a file of that "
                             "folder.")  # fmt: skip
    headers = {file: read_header(folder / file) for file in dict.fromkeys(weight_map.values())}
    for name, file in weight_map.items():
        if name not in headers[file]:
            raise InputError(f"The tensor {name:.200} is missing in {folder / file}, where {INDEX} places it.")
    for file, header in headers.items():
        for name in header:
            if weight_map.get(name) != file:
                raise InputError(f"The tensor {name} stands in {folder / file}, where {INDEX} does not place it.")
    return {name: headers[file][name] for name, file in weight_map.items()}
