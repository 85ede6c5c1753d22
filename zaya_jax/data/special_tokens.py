"""Find the special tokens that begin and end documents, and that chat templates receive."""

from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.config.checks import shown
from zaya_jax.data.tokenizer import load_tokenizer, read_beside
from zaya_jax.errors import InputError
from zaya_jax.run.tokenizer import GENERATION, SPECIAL_MAP, TOKENIZER_CONFIG

# Files that a model's folder may have next to tokenizer.json. Preparation copies them, for runs and exports.
TOKENIZER_FILES = (TOKENIZER_CONFIG, SPECIAL_MAP, "chat_template.jinja", GENERATION)
_OTHERS = ("unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
BOS_TEXTS = ("<bos>", "<s>", "<|begin_of_text|>", "<|startoftext|>")  # common tokens that begin a text


class SpecialTokens(NamedTuple):
    """Texts of the special tokens."""

    eot: str  # ends a document
    bos: str | None  # begins a document, and `bos_token` of templates; None if there is none
    eos: str | None  # `eos_token` of templates


def find_special_tokens(tokenizer: Path, *, chat: bool, eot: str | None, bos: str | None) -> SpecialTokens:
    """Find the special tokens in the `tokenizer_config.json` next to the tokenizer and in its vocabulary.

    The templates of conversations (`chat`) always receive `bos_token`, as in transformers; text documents do not begin
    with it if `add_bos_token` is false. `eot` ends a document; None detects it, see `load_tokenizer`. `bos` begins one,
    unless it is 'none'; None selects `bos_token` of `tokenizer_config.json`, otherwise the special token among
    `BOS_TEXTS`, otherwise `eot`. `InputError` if a file cannot be read, or a token is unknown or ambiguous.
    """
    path = tokenizer.with_name(TOKENIZER_CONFIG)
    config = read_beside(path)
    eos = token_text(config, "eos_token", path)
    loaded = load_tokenizer(tokenizer, eot, default_eot=eos)
    if bos is not None:
        begin = None if bos == "none" else bos
    elif "bos_token" in config:
        begins = chat or config.get("add_bos_token") is not False
        begin = token_text(config, "bos_token", path) if begins else None
    else:
        known = [text for text in BOS_TEXTS if text in loaded.specials]
        if len(known) > 1:
            advice = "choose the token that begins a document with --bos"
            raise InputError(f"The tokenizer file {tokenizer} has {' and '.join(known)}; {advice}.")
        begin = known[0] if known else loaded.eot_text
    if begin is not None and loaded.token_id(begin) is None:
        origin = "--bos" if bos is not None else f"bos_token of {path}"
        advice = "pass --bos with one of its tokens, or none"
        raise InputError(f"{origin} is {begin!r}, which the tokenizer file {tokenizer} does not have; {advice}.")
    return SpecialTokens(loaded.eot_text, begin, eos if "eos_token" in config else loaded.eot_text)


def other_tokens(folder: Path) -> dict[str, str]:
    """Read the tokens that templates receive besides `bos_token` and `eos_token`, as in transformers."""
    path = folder / TOKENIZER_CONFIG
    config = read_beside(path)
    if "added_tokens_decoder" not in config:
        config |= read_beside(folder / SPECIAL_MAP)
    return {name: text for name in _OTHERS if (text := token_text(config, name, path)) is not None}


def token_text(config: dict[str, Any], key: str, path: Path) -> str | None:
    """Return a token's text, given as a string or an object with a `content`; None if it is null or absent."""
    token = config.get(key)
    text = token.get("content") if isinstance(token, dict) else token
    if token is not None and not (isinstance(text, str) and text):
        allowed = "null, text, or an object with the key content"
        raise InputError(f"{key} of {path} is {shown(token)}, but must be {allowed}.")
    return text
