"""The tokenizer and generation files of a run (`RUN_DIR/tokenizer/`) or a `transformers` folder.

`transformers` needs them next to the weights, so exports include them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zaya_jax.run.files import explained, json_text, read_object, write_atomically
from zaya_jax.run.writing import make_folder

TOKENIZER_FOLDER = "tokenizer"  # in a run folder
GENERATION = "generation_config.json"
# Files next to the weights: tokenizer, chat template, generation.
TOKENIZER, TOKENIZER_CONFIG, SPECIAL_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TOKENIZER_FILES = ("tokenizer*", SPECIAL_MAP, "added_tokens.json", "chat_template*", GENERATION, "vocab*", "merges.txt")
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")  # in config.json and generation_config.json


def tokenizer_files(folder: Path) -> list[Path]:
    """List the tokenizer and generation files of a folder."""
    return sorted(path for form in TOKENIZER_FILES for path in folder.glob(form) if path.is_file())


def special_ids(folder: Path | None) -> dict[str, Any]:
    """Read the ids of special tokens from `config.json`, else from `generation_config.json`; None where unknown."""
    ids: dict[str, Any] = dict.fromkeys(_IDS)
    for path in () if folder is None else (folder / GENERATION, folder / "config.json"):
        tree = read_object(path) if path.exists() else {}
        ids.update({key: tree[key] for key in _IDS if tree.get(key) is not None})
    return ids


def run_tokenizer(checkpoint: Path) -> Path | None:
    """Return the tokenizer folder of a checkpoint's run; None if it has none."""
    folder = checkpoint.parent.parent / TOKENIZER_FOLDER
    return folder if folder.is_dir() else None


def copy_tokenizer(source: Path, run: Path) -> None:
    """Copy the tokenizer and generation files of a folder, if any, into a run."""
    files, target = tokenizer_files(source), run / TOKENIZER_FOLDER
    ids = known(special_ids(source))
    if not files and not ids:
        return
    with explained(f"{target} cannot be written"):
        make_folder(target)
        for path in files:
            write_atomically(target / path.name, path.read_bytes())
        generation = read_object(target / GENERATION) if (target / GENERATION).exists() else {}
        if ids.keys() - known(generation).keys():  # those that config.json alone has
            write_atomically(target / GENERATION, json_text(ids | known(generation)))


def tokenizer_settings(bos: str | None, eos: str | None, pad: str) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json` for a `tokenizer.json` without one."""
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {**kind, "bos_token": bos, "eos_token": eos, "pad_token": pad}


def known(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys whose values are known."""
    return {key: value for key, value in tree.items() if value is not None}
