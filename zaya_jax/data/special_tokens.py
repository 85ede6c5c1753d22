"""The special tokens that begin and end documents, and those that chat templates receive."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.data.tokenizer import load_tokenizer
from zaya_jax.errors import InputError

TOKENIZER_CONFIG = "tokenizer_config.json"
# Beside tokenizer.json in a model's folder. A prepared folder carries those there are, for runs and exports.
TOKENIZER_FILES = (TOKENIZER_CONFIG, "special_tokens_map.json", "chat_template.jinja", "generation_config.json")
BOS_TEXTS = ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>")  # special tokens that begin a text


class SpecialTokens(NamedTuple):
    """Special tokens as text."""

    eot: str  # ends a document
    bos: str | None  # begins a document, and is the `bos_token` of templates; None where nothing does
    eos: str | None  # the `eos_token` of templates


def find_special_tokens(tokenizer: Path, *, chat: bool, eot: str | None, bos: str | None) -> SpecialTokens:
    """Find the special tokens by the `tokenizer_config.json` beside the tokenizer and by its vocabulary.

    Args:
      tokenizer: a `tokenizer.json`.
      chat: whether conversations are prepared. Templates get `bos_token` whatever `add_bos_token` says, as in
        transformers; documents of text begin with it unless that is false.
      eot: the token that ends a document; None finds it, see `load_tokenizer`.
      bos: the token that begins a document, 'none' for nothing. None takes `bos_token` of the configuration.
        Without one, it is the special token among `BOS_TEXTS` or, where there is none, `eot`.

    Raises:
      InputError: a file cannot be read, or a token is unknown, ambiguous or not in the vocabulary.
    """
    path = tokenizer.with_name(TOKENIZER_CONFIG)
    config = _read_config(path)
    eos = _text(config, "eos_token", path)
    loaded = load_tokenizer(tokenizer, eot, default_eot=eos)
    if bos is not None:
        begin = None if bos == "none" else bos
    elif "bos_token" in config:
        begin = _text(config, "bos_token", path)
        if not chat and config.get("add_bos_token") is False:
            begin = None
    else:
        known = [text for text in BOS_TEXTS if text in loaded.specials]
        if len(known) > 1:
            raise InputError(f"The tokenizer file {tokenizer} has {' and '.join(known)}; choose the token that begins "
                             "a document with --bos.")  # fmt: skip
        begin = known[0] if known else loaded.eot_text
    if begin is not None and loaded.token_id(begin) is None:
        where = "--bos" if bos is not None else f"bos_token of {path}"
        raise InputError(f"{where} is {begin!r}, which the tokenizer file {tokenizer} does not have; pass --bos with "
                         "one of its tokens, or none.")  # fmt: skip
    return SpecialTokens(loaded.eot_text, begin, eos if "eos_token" in config else loaded.eot_text)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"The file {path} next to the tokenizer cannot be read: {error}.") from error
    if not isinstance(config, dict):
        raise InputError(f"The file {path} next to the tokenizer is not a JSON object.")
    return config


def _text(config: dict[str, Any], key: str, path: Path) -> str | None:
    """A token's text, which is a string or an object with a `content`; None where it is null or absent."""
    token = config.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    if token is not None and not (isinstance(text, str) and text):
        raise InputError(f"{key} of {path} is {token!r:.100}, but must be null, text, or an object with a content.")
    return text
