"""Write a `transformers` folder in either layout, one layer at a time, as a whole or not at all."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.errors import InputError
from zaya_jax.hf.config import to_hf
from zaya_jax.hf.finite import finite_cast
from zaya_jax.hf.folder import INDEX
from zaya_jax.hf.legacy_config import to_legacy
from zaya_jax.hf.safetensors import DTYPES, TensorHeader, write_file
from zaya_jax.hf.tensors import legacy_tensors, tensors
from zaya_jax.hf.tokenizer_files import complete_tokenizer_files
from zaya_jax.model.hf_names import HfTensor
from zaya_jax.model.tree import balancing_biases, is_balancing_bias, parameters
from zaya_jax.model.zaya import Zaya
from zaya_jax.run.files import expanded, json_text, sync_folder, write_atomically
from zaya_jax.run.progress import WorkProgress
from zaya_jax.run.tokenizer import TOKENIZER_FILES
from zaya_jax.run.writing import PARTIAL, new_folder, resolved

Layout = Literal["hf", "legacy"]
LAYOUTS: dict[str, tuple[Callable[[ModelConfig, str], dict[str, Any]], Callable[[ModelConfig], Iterator[HfTensor]]]] = {
    "hf": (to_hf, tensors),
    "legacy": (to_legacy, legacy_tensors),
}
CARD = "README.md"

Read = Callable[[str, int | None], np.ndarray]


def write_folder(folder: str | Path, config: ModelConfig, read: Read, dtype: jax.typing.DTypeLike,
                 layout: Layout = "hf", carry: str | Path | None = None, card: str | None = None,
                 max_shard_bytes: int = 5 * 10**9) -> None:  # fmt: skip
    """Write a model atomically, from one process; the host holds one or two layers of a parameter at a time.

    `read` returns a parameter, given its name (`model.tree`) and its index in the stack (None if it is not stacked).
    Parameters get `dtype`; balancing biases are always fp32. The `layout` is 'hf' for current `transformers`
    (docs/reference.md §12.1), 'legacy' for the first release (§12.2). Tokenizer, chat template, generation files and
    the special tokens of `config.json` are those of the folder `carry`, and `README.md` is `card`. A file has at most
    `max_shard_bytes`, unless a single tensor is larger.

    `InputError`, before anything is written, if `folder` is not empty, `carry` is not a folder, the layout cannot
    represent the architecture, or a value is not finite in `dtype`.
    """
    kind = stored_dtype(dtype)
    describe, names = LAYOUTS[layout]
    described = describe(config, kind.name)
    files, ids = complete_tokenizer_files(carry)
    files |= {"config.json": json_text(described | ids)} | ({CARD: card} if card else {})
    with output_folder(folder, files) as partial:
        # The legacy layout asks for a parameter once for each expert.
        read_once = functools.lru_cache(maxsize=1)(read)
        _write_weights(partial, list(names(config)), read_once, kind, max_shard_bytes)


def stored_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    """Return the NumPy dtype of an export; InputError if files cannot have it."""
    kind = np.dtype(jnp.dtype(dtype))
    if kind not in DTYPES.values():
        allowed = ", ".join(known.name for known in DTYPES.values())
        raise InputError(f"The dtype is {kind.name}, but must be one of {allowed}.")
    return kind


def save_pretrained(model: Zaya, folder: str | Path, layout: Layout = "hf") -> None:
    """Write `model` as a `transformers` folder, in the dtype of its embedding; raises like `write_folder`.

    `InputError` also if the model is `unrolled`.
    """
    if len(model.blocks) != len(model.config.layer_kinds):
        raise InputError("This model was unrolled to generate. Save the model that it was made from.")
    values = {**parameters(model), **balancing_biases(model)}
    write_folder(folder, model.config, read_arrays(values), model.dtype, layout)


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
