"""The tokenizer and generation files of a run (`RUN_DIR/tokenizer/`) or a `transformers` folder.

`transformers` needs them next to the weights, so exports include them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from zaya_jax.errors import InputError
from zaya_jax.run.files import json_text, read_object, write_atomically
from zaya_jax.run.writing import make_folder

TOKENIZER_FOLDER = "tokenizer"  # in a run folder
GENERATION = "generation_config.json"
# Files next to the weights: tokenizer, chat template, generation.
TOKENIZER, TOKENIZER_CONFIG, SPECIAL_MAP = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TOKENIZER_FILES = ("tokenizer*", SPECIAL_MAP, "added_tokens.json", "chat_template*", GENERATION, "vocab*", "merges.txt")
_TEMPLATE = "chat_template.jinja"
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
    ids = _known(special_ids(source))
    if not files and not ids:
        return
    try:
        make_folder(target)
        for path in files:
            write_atomically(target / path.name, path.read_bytes())
        generation = read_object(target / GENERATION) if (target / GENERATION).exists() else {}
        if ids.keys() - _known(generation).keys():  # those that config.json alone has
            write_atomically(target / GENERATION, json_text(ids | _known(generation)))
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error.strerror}.") from error


class TrainedTokenizer(NamedTuple):
    """The tokenizer of a run's data, and how the run uses it."""

    folder: Path  # prepared data folder with the tokenizer files
    file: str  # name of the `tokenizer.json` there
    token_id: Callable[[str], int | None]  # text of a token → id
    bos: str | None  # token that begins a document
    eos: str  # `eos_token` for `transformers`
    stops: Sequence[str]  # tokens that end a text in training; the first ends a document and is the padding token
    template: str | None  # chat template, if the run reads conversations
    origin: Path | None  # folder with more tokenizer files to copy, used only if its tokenizer is the same


def write_tokenizer_files(run: Path, tokenizer: TrainedTokenizer, say: Callable[[str], object] = print) -> None:
    """Write missing tokenizer files into the run folder, and the chat template if the configuration changed it.

    A failure, as on a full disk, is reported (`say`) and does not stop the run; the next start tries again.
    """
    target = run / TOKENIZER_FOLDER
    try:
        make_folder(target)
        for name, text in _contents(tokenizer).items():
            path = target / name
            if not path.exists() or (name == _TEMPLATE and path.read_bytes() != text.encode()):
                write_atomically(path, text)
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error).removesuffix(".")
        remedy = "Training continues; exports can add a tokenizer with export-hf --carry."
        say(f"Warning: the tokenizer could not be written to {target}: {why}. {remedy}")


def _contents(tokenizer: TrainedTokenizer) -> dict[str, str]:
    """Return name → content: the data's files, then those of `origin` if it has the same tokenizer, then new ones."""
    origin, template, token_id = tokenizer.origin, tokenizer.template, tokenizer.token_id
    raw = (tokenizer.folder / tokenizer.file).read_bytes()
    files, ids = _texts(tokenizer.folder) | {TOKENIZER: raw.decode("utf-8")}, dict[str, Any]()
    if origin is not None and (origin / TOKENIZER).is_file() and (origin / TOKENIZER).read_bytes() == raw:
        files, ids = _texts(origin) | files, _known(special_ids(origin))

    settings = tokenizer_settings(tokenizer.bos, tokenizer.eos, tokenizer.stops[0])
    if TOKENIZER_CONFIG in files:
        settings = _object(files[TOKENIZER_CONFIG])
    if template is not None:  # the model was trained with it, so it replaces the tokenizer's own
        files[_TEMPLATE] = template
        settings.pop("chat_template", None)
    if TOKENIZER_CONFIG not in files or template is not None:
        files[TOKENIZER_CONFIG] = json_text(settings)

    generation = ids | (_known(_object(files[GENERATION])) if GENERATION in files else {})
    stops = generation.get("eos_token_id") or []
    stops = list(stops) if isinstance(stops, list) else [stops]
    for text in tokenizer.stops:
        if (stop := token_id(text)) not in (None, *stops):
            stops.append(stop)
    bos = None if tokenizer.bos is None else token_id(tokenizer.bos)
    defaults = {"bos_token_id": bos, "pad_token_id": token_id(tokenizer.stops[0])}
    generation = defaults | generation | {"eos_token_id": stops[0] if len(stops) == 1 else stops}
    return files | {GENERATION: json_text(_known(generation))}


def tokenizer_settings(bos: str | None, eos: str | None, pad: str) -> dict[str, Any]:
    """Return the content of `tokenizer_config.json` for a `tokenizer.json` without one."""
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    return {**kind, "bos_token": bos, "eos_token": eos, "pad_token": pad}


def _known(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tree.items() if value is not None}


def _object(text: str) -> dict[str, Any]:
    tree = json.loads(text)
    if not isinstance(tree, dict):
        raise InputError("tokenizer_config.json or generation_config.json is not a JSON object.")
    return tree


def _texts(folder: Path) -> dict[str, str]:
    """Read the text files of a tokenizer; binary ones (`tokenizer.model`) are not needed."""
    texts = [path for path in tokenizer_files(folder) if path.suffix in (".json", ".jinja", ".txt")]
    return {path.name: path.read_bytes().decode("utf-8") for path in texts}
