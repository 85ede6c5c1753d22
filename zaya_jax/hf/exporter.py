"""Write a `transformers` folder, one layer at a time, as a whole or not at all."""

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.config.checks import require
from zaya_jax.data.special_tokens import find_special_tokens, token_text
from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.errors import InputError
from zaya_jax.hf.config import to_hf
from zaya_jax.hf.folder import INDEX
from zaya_jax.hf.safetensors import DTYPES, TensorHeader, finite_cast, write_file
from zaya_jax.hf.tensors import tensors
from zaya_jax.model.hf_names import HfTensor
from zaya_jax.model.tree import balancing_biases, is_balancing_bias, parameters
from zaya_jax.model.zaya import Zaya
from zaya_jax.run import tokenizer as names
from zaya_jax.run.files import expanded, json_text, read_object, sync_folder, write_atomically
from zaya_jax.run.progress import WorkProgress
from zaya_jax.run.tokenizer import GENERATION, TOKENIZER, TOKENIZER_CONFIG, TOKENIZER_FILES, known, special_ids
from zaya_jax.run.writing import PARTIAL, new_folder, resolved

CARD = "README.md"

Read = Callable[[str, int | None], np.ndarray]


def write_folder(folder: str | Path, config: ModelConfig, read: Read, dtype: jax.typing.DTypeLike,
                 carry: str | Path | None = None, card: str | None = None,
                 max_shard_bytes: int = 5 * 10**9) -> None:  # fmt: skip
    """Write a model atomically, from one process; the host holds one layer of one parameter at a time.

    `read` returns a parameter, given its name (`model.tree`) and its index in the stack (None if it is not stacked).
    Parameters get `dtype`; balancing biases are always fp32 (docs/reference.md §12.1). Tokenizer, chat template,
    generation files and the special tokens of `config.json` are those of the folder `carry`, and `README.md` is `card`.
    A file has at most `max_shard_bytes`, unless a single tensor is larger.

    `InputError`, before anything is written, if `folder` is not empty, `carry` is not a folder, `transformers` cannot
    represent the architecture, or a value is not finite in `dtype`.
    """
    kind = stored_dtype(dtype)
    described = to_hf(config, kind.name)
    files, ids = complete_tokenizer_files(carry)
    files |= {"config.json": json_text(described | ids)} | ({CARD: card} if card else {})
    with output_folder(folder, files) as partial:
        _write_weights(partial, list(tensors(config)), read, kind, max_shard_bytes)


def stored_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    """Return the NumPy dtype of an export; InputError if files cannot have it."""
    kind = np.dtype(jnp.dtype(dtype))
    if kind not in DTYPES.values():
        allowed = ", ".join(known.name for known in DTYPES.values())
        raise InputError(f"The dtype is {kind.name}, but must be one of {allowed}.")
    return kind


def save_pretrained(model: Zaya, folder: str | Path) -> None:
    """Write `model` as a `transformers` folder, in the dtype of its embedding; raises like `write_folder`.

    `InputError` also if the model is `unrolled`.
    """
    if len(model.blocks) != len(model.config.layer_kinds):
        raise InputError("This model was unrolled to generate. Save the model that it was made from.")
    values = {**parameters(model), **balancing_biases(model)}
    write_folder(folder, model.config, read_arrays(values), model.dtype)


def read_arrays(values: Mapping[str, jax.Array]) -> Read:
    """Return `write_folder`'s `read` for parameters and balancing biases on this process's devices."""
    return lambda name, group: np.asarray(values[name] if group is None else values[name][group])


def _write_weights(folder: Path, rows: list[HfTensor], read: Read, dtype: np.dtype, most: int) -> None:
    described = _described(rows, dtype)
    shards: list[list[HfTensor]] = [[]]
    size = 0
    for row in rows:
        size += described[row.name].bytes
        if shards[-1] and size > most:
            shards.append([])
            size = described[row.name].bytes
        shards[-1].append(row)
    files = {f"model-{number:05d}-of-{len(shards):05d}.safetensors": shard for number, shard in enumerate(shards, 1)}
    write_tensors(folder, files if len(shards) > 1 else {"model.safetensors": rows}, read, dtype)
    if len(shards) > 1:
        size = sum(each.bytes for each in described.values())
        places = {row.name: name for name, shard in files.items() for row in shard}
        write_atomically(folder / INDEX, json_text({"metadata": {"total_size": size}, "weight_map": places}))


def write_tensors(folder: Path, files: Mapping[str, list[HfTensor]], read: Read, dtype: np.dtype) -> None:
    """Write the files of an existing folder by name, one tensor at a time; see `write_folder`."""
    described = {name: _described(rows, dtype) for name, rows in files.items()}
    total = sum(tensor.bytes for tensors in described.values() for tensor in tensors.values())
    with WorkProgress("exporting", total) as progress:

        def content(row: HfTensor, tensor: TensorHeader) -> memoryview:
            ours = read(row.leaf, row.group)
            theirs = row.to_theirs(ours if row.part is None else ours[row.part])
            values = finite_cast(theirs, tensor.dtype, row.name, "export an earlier checkpoint")
            progress.add(tensor.bytes)
            return values.reshape(-1).view(np.uint8).data

        for name, rows in files.items():
            write_file(folder / name, described[name], (content(row, described[name][row.name]) for row in rows))


def _described(rows: list[HfTensor], dtype: np.dtype) -> dict[str, TensorHeader]:
    exact = np.dtype(np.float32)
    return {row.name: TensorHeader(exact if is_balancing_bias(row.leaf) else dtype, row.shape) for row in rows}


_WRITTEN = ("*model*.safetensors", "*model*.safetensors.partial", INDEX, "config.json", "adapter_config.json")
_WRITTEN += (CARD, *TOKENIZER_FILES)


@contextlib.contextmanager
def output_folder(folder: str | Path, files: Mapping[str, Path | str]) -> Iterator[Path]:
    """Yield a temporary folder, which takes the name `folder` at the end, or is removed on failure.

    After the block, `files` are added: name → file to copy or text to write. `InputError` if `folder` is not empty, or
    `FOLDER.partial` was not left by an interrupted export.
    """
    folder = resolved(expanded(folder))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder; choose a new or empty one.")
    partial = folder.with_name(f"{os.fsdecode(os.fsencode(folder.name)[:247])}.partial")  # a name has at most 255 bytes
    if os.path.lexists(partial):
        is_own = not partial.is_symlink() and partial.is_dir() and partial.stat().st_uid == os.geteuid()
        known = is_own and all(PARTIAL.fullmatch(x.name) or any(map(x.match, _WRITTEN)) for x in partial.iterdir())
        if not known:
            problem = f"{partial} exists and was not left by an interrupted export"
            raise InputError(f"{problem}. Move or delete it, then rerun.")
    try:
        with new_folder(folder, partial):
            yield partial
            for name, content in files.items():
                write_atomically(partial / name, content.read_bytes() if isinstance(content, Path) else content)
            sync_folder(partial)
    except OSError as error:
        if str(error.filename or partial).startswith(str(partial)):
            error.filename = str(folder)
        raise


def complete_tokenizer_files(folder: str | Path | None) -> tuple[dict[str, Path | str], dict[str, Any]]:
    """Return the tokenizer files of an export, and its special tokens.

    A file is added, or keys to it, if `transformers` would otherwise guess: without `tokenizer_class` it loads a Gemma
    tokenizer, without `eos_token_id` text ends at Gemma's. A value that is present stays.

    The `folder` is a run's `tokenizer/`, a `transformers` folder or one of prepared data; None for no files. Returns
    name → file to copy or text to write; and `bos_token_id`, `eos_token_id` and `pad_token_id` for `config.json`, null
    where unknown. `InputError` if `folder` is no folder, a file cannot be read, or no token is known to end a text.
    """
    if folder is None:
        return {}, special_ids(None)
    folder = expanded(folder)
    require(folder.is_dir(), "--carry", str(folder), "an existing folder")
    files: dict[str, Path | str] = {path.name: path for path in names.tokenizer_files(folder)}
    settings = read_object(folder / TOKENIZER_CONFIG) if TOKENIZER_CONFIG in files else {}
    generation = read_object(folder / GENERATION) if GENERATION in files else {}
    ids = special_ids(folder)
    if TOKENIZER in files and (ids["eos_token_id"] is None or "tokenizer_class" not in settings):
        special = find_special_tokens(folder / TOKENIZER, chat=True, eot=None, bos=None)
        token_id = load_tokenizer(folder / TOKENIZER, special.eot).token_id
        eos = special.eos or special.eot
        pad = token_text(settings, "pad_token", folder / TOKENIZER_CONFIG) or special.eot
        stops = list(dict.fromkeys(token_id(text) for text in (eos, special.eot)))
        bos, ends = None if special.bos is None else token_id(special.bos), stops if len(stops) > 1 else stops[0]
        detected = {"bos_token_id": bos, "eos_token_id": ends, "pad_token_id": token_id(pad)}
        ids = {key: detected[key] if value is None else value for key, value in ids.items()}
        defaults = names.tokenizer_settings(special.bos, eos, pad)
        if names.SPECIAL_MAP in files:  # it names the tokens
            defaults = {key: value for key, value in defaults.items() if not key.endswith("_token")}
        files[TOKENIZER_CONFIG] = json_text(defaults | settings)
    if files and known(ids).keys() - known(generation).keys():
        files[GENERATION] = json_text(known(ids) | known(generation))
    return files, ids
