"""Write a folder as a whole or not at all."""

import contextlib
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from zaya_jax.errors import InputError
from zaya_jax.run.files import expanded, sync_folder
from zaya_jax.run.tokenizer import TOKENIZER_FILES

_WRITTEN = ("*model*.safetensors", "*model*.safetensors.partial", "model.safetensors.index.json", "config.json",
            "adapter_config.json", *TOKENIZER_FILES)  # fmt: skip


@contextlib.contextmanager
def output_folder(folder: str | Path, files: Mapping[str, Path | str]) -> Iterator[Path]:
    """Yield a temporary folder, which takes the name `folder` at the end, or is removed on failure.

    Args:
      folder: new or empty.
      files: name → file to copy or text to write, after the block.

    Raises:
      InputError: `folder` is not empty, or `FOLDER.partial` was not left by an interrupted export.
    """
    folder = expanded(folder).resolve()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder; choose a new or empty one.")
    partial = folder.with_name(f"{os.fsdecode(os.fsencode(folder.name)[:247])}.partial")  # a name has at most 255 bytes
    _remove_remains(partial)
    try:
        partial.mkdir(parents=True)
        yield partial
        for name, content in files.items():
            if isinstance(content, Path):
                shutil.copyfile(content, partial / name)
            else:
                (partial / name).write_text(content, encoding="utf-8", errors="backslashreplace")
        sync_folder(partial)
        partial.replace(folder)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError) and str(error.filename or partial).startswith(str(partial)):
            error.filename = str(folder)
        raise


def _remove_remains(partial: Path) -> None:
    """Remove leftovers of a killed export, and nothing else."""
    if not partial.exists():
        return
    if not partial.is_dir() or not all(any(path.match(form) for form in _WRITTEN) for path in partial.iterdir()):
        raise InputError(f"{partial} exists and was not left by an interrupted export. Move or delete it, then rerun.")
    shutil.rmtree(partial)
