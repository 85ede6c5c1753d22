"""`RUN_DIR/tokenizer/`: what `transformers` needs beside the weights, so that an export of the run is complete."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zaya_jax.config import Config
from zaya_jax.config.schema import HF
from zaya_jax.data.chat import DEFAULT_TEMPLATE
from zaya_jax.data.sources import Prepared, Source
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import checkpoint_folder
from zaya_jax.run.files import write_atomically
from zaya_jax.run.tokenizer_folder import (
    GENERATION,
    TOKENIZER_FOLDER,
    run_tokenizer,
    special_ids,
    tokenizer_files,
)

_TOKENIZER, _CONFIG, _TEMPLATE = "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"
# Training writes out whole conversations, so the built-in template has no place for an answer to come.
_PROMPT = "{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}\n"
_END_OF_TURN = "<|im_end|>"  # of the built-in template


def write_tokenizer(folder: Path, config: Config, prepared: Prepared, say: Callable[[str], object] = print) -> None:
    """Write the files that the run folder lacks, and the chat template where the configuration changed it.

    Where that fails, as on a full disk, `say` gets a sentence and the run continues: `export-hf --carry` adds a
    tokenizer, too, and so does the next start.
    """
    target = folder / TOKENIZER_FOLDER
    try:
        target.mkdir(exist_ok=True)
        for name, text in _contents(config, prepared).items():
            path = target / name
            if not path.exists() or (name == _TEMPLATE and path.read_bytes() != text.encode()):
                write_atomically(path, text)
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error).removesuffix(".")
        say(f"Warning: the tokenizer could not be written to {target}: {why}. Training continues; export-hf --carry "
            "adds a tokenizer, too.")  # fmt: skip


def _contents(config: Config, prepared: Prepared) -> dict[str, str]:
    """The files by name: the data's own, then those of `init_from` if its tokenizer is the same, then made ones."""
    source = next(iter(prepared.sources.values()))
    tokenizer, manifest = prepared.tokenizer, source.manifest
    raw = (source.folder / manifest.tokenizer.file).read_bytes()
    found = _texts(source.folder)
    found[_TOKENIZER] = raw.decode("utf-8")
    ids: dict[str, Any] = {}
    origin = _init_folder(config)
    if origin is not None and (origin / _TOKENIZER).is_file() and (origin / _TOKENIZER).read_bytes() == raw:
        found, ids = _texts(origin) | found, special_ids(origin)

    bos, eos = manifest.bos, manifest.eos or manifest.eot
    plain = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, "bos_token": bos,
            "eos_token": eos, "pad_token": manifest.eot}  # fmt: skip
    settings = _object(found, _CONFIG) if _CONFIG in found else plain
    template = _chat_template(config, prepared.sources)
    if template is not None:  # which the model was trained with, whatever the tokenizer's own is
        found[_TEMPLATE] = template
        settings.pop("chat_template", None)
    if _CONFIG not in found or template is not None:
        found[_CONFIG] = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    generation = _object(found, GENERATION) if GENERATION in found else ids
    stops = generation.get("eos_token_id") or []
    stops = list(stops) if isinstance(stops, list) else [stops]
    for text in (manifest.eot, eos, *([_END_OF_TURN] if _is_builtin(template) else [])):  # what ends a text in training
        if (stop := tokenizer.token_id(text)) not in (None, *stops):
            stops.append(stop)
    made = {"bos_token_id": None if bos is None else tokenizer.token_id(bos), "pad_token_id": tokenizer.eot}
    generation = made | generation | {"eos_token_id": stops[0] if len(stops) == 1 else stops}
    found[GENERATION] = (
        json.dumps({key: value for key, value in generation.items() if value is not None}, indent=2) + "\n"
    )
    return found


def _object(found: Mapping[str, str], name: str) -> dict[str, Any]:
    tree = json.loads(found[name])
    if not isinstance(tree, dict):
        raise InputError(f"{name} of the tokenizer holds no JSON object.")
    return tree


def _texts(folder: Path) -> dict[str, str]:
    """The tokenizer's files of a folder that are text; a `tokenizer.model` is of a library that needs no other here."""
    return {path.name: path.read_bytes().decode("utf-8") for path in tokenizer_files(folder)
            if path.suffix in (".json", ".jinja", ".txt")}  # fmt: skip


def _init_folder(config: Config) -> Path | None:
    """Where the tokenizer of `init_from` lies, if it is still there."""
    if config.init_from is None:
        return None
    try:
        if config.init_from.startswith(HF):
            return Path(config.init_from.removeprefix(HF)).expanduser()
        return run_tokenizer(checkpoint_folder(config.init_from))
    except InputError:  # a run that resumes does not need it any more
        return None


def _chat_template(config: Config, sources: Mapping[str, Source]) -> str | None:
    """The template of the last phase that reads conversations; None where none does."""
    chats = {name for name, source in sources.items() if source.manifest.kind == "chat"}
    phases = [phase for phase in config.phases if chats.intersection(phase.mixture or sources)]
    if not phases:
        return None
    path = phases[-1].template
    return DEFAULT_TEMPLATE + _PROMPT if path is None else Path(path).expanduser().read_text(encoding="utf-8")


def _is_builtin(template: str | None) -> bool:
    return template is not None and template.startswith(DEFAULT_TEMPLATE)
