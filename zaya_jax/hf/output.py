"""Write a folder as a whole or not at all."""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from zaya_jax.errors import InputError
from zaya_jax.run.files import expanded, sync_folder, write_atomically
from zaya_jax.run.tokenizer import TOKENIZER_FILES
from zaya_jax.run.writing import PARTIAL, new_folder, resolved

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
    folder = resolved(expanded(folder))
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} exists and is not an empty folder; choose a new or empty one.")
    partial = folder.with_name(f"{os.fsdecode(os.fsencode(folder.name)[:247])}.partial")  # a name has at most 255 bytes
    _check_remains(partial)
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


def _check_remains(partial: Path) -> None:
    """Raise `InputError` for anything but what a killed export of this user left."""
    if not os.path.lexists(partial):
        return
    is_own = not partial.is_symlink() and partial.is_dir() and partial.stat().st_uid == os.geteuid()
    if not is_own or not all(
        PARTIAL.fullmatch(path.name) or any(map(path.match, _WRITTEN)) for path in partial.iterdir()
    ):
        raise InputError(f"{partial} exists and was not left by an interrupted export. Move or delete it, then rerun.")
