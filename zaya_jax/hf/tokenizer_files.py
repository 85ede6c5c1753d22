"""The tokenizer files of an exported folder: those of a source, completed so that `transformers` can load them."""

from pathlib import Path
from typing import Any

from zaya_jax.config.checks import require
from zaya_jax.data.special_tokens import find_special_tokens, token_text
from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.run import tokenizer as names
from zaya_jax.run.files import expanded, json_text, read_object
from zaya_jax.run.tokenizer import GENERATION, TOKENIZER, TOKENIZER_CONFIG, known, special_ids


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
