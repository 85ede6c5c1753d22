"""The tokenizer and generation files of a run (`RUN_DIR/tokenizer/`) or of a folder of `transformers`."""

import json
import shutil
from pathlib import Path
from typing import Any

from zaya_jax.errors import InputError
from zaya_jax.run.files import read_json, write_atomically

TOKENIZER_FOLDER = "tokenizer"  # of a run
GENERATION = "generation_config.json"
# What stands beside the weights: tokenizer, chat template, generation.
TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "added_tokens.json", "chat_template*", GENERATION,
                   "vocab*", "merges.txt")  # fmt: skip
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # in config.json and generation_config.json


def tokenizer_files(folder: Path) -> list[Path]:
    """The files of a folder that belong to its tokenizer or to generation."""
    return sorted(path for form in TOKENIZER_FILES for path in folder.glob(form) if path.is_file())


def special_ids(folder: Path) -> dict[str, Any]:
    """The ids of special tokens by `config.json` and, where that has none, `generation_config.json`."""
    found: dict[str, Any] = {}
    for path in (folder / GENERATION, folder / "config.json"):
        tree = read_json(path) if path.exists() else {}
        if not isinstance(tree, dict):
            raise InputError(f"{path} holds no JSON object.")
        found.update({key: tree[key] for key in _IDS if key in tree})
    return found


def run_tokenizer(checkpoint: Path) -> Path | None:
    """The tokenizer folder of the run that a checkpoint is of; None where it has none."""
    folder = checkpoint.parent.parent / TOKENIZER_FOLDER
    return folder if folder.is_dir() else None


def copy_tokenizer(source: Path, run: Path) -> None:
    """Copy the tokenizer and generation files of a folder into a run, if there are any."""
    files, target = tokenizer_files(source), run / TOKENIZER_FOLDER
    ids = special_ids(source)
    if not files and not ids:
        return
    try:
        target.mkdir(parents=True, exist_ok=True)
        for path in files:
            shutil.copyfile(path, target / path.name)
        if ids and not (target / GENERATION).exists():
            write_atomically(target / GENERATION, json.dumps(ids, indent=2) + "\n")
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}.") from error
