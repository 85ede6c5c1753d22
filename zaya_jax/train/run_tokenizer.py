"""Write the tokenizer of a run's data to `RUN_DIR/tokenizer/`."""

import contextlib
import json
from pathlib import Path
from typing import Any

from zaya_jax.config import Config
from zaya_jax.data.chat.template import DEFAULT_TEMPLATE
from zaya_jax.data.loading.sources import Prepared
from zaya_jax.errors import InputError, printable
from zaya_jax.run import tokenizer as names
from zaya_jax.run.files import expanded, json_text, write_atomically
from zaya_jax.run.tokenizer import GENERATION, TOKENIZER, TOKENIZER_CONFIG, known, special_ids
from zaya_jax.run.writing import make_folder
from zaya_jax.weights.load import tokenizer_folder
from zaya_jax.weights.sources import Weights

_TEMPLATE = "chat_template.jinja"
# Training renders complete conversations, so the built-in template has no generation prompt.
_PROMPT = "{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}\n"
_END_OF_TURN = "<|im_end|>"  # of the built-in template


def write_tokenizer(folder: Path, config: Config, prepared: Prepared, weights: Weights | None = None) -> None:
    """Write missing tokenizer files into the run folder, and the chat template if the configuration changed it.

    `weights` are those of `init_from`, if the run has opened them. A failure, as on a full disk, is reported and does
    not stop the run; the next start tries again.
    """
    origin, template = None if weights is None else weights.tokenizer, _chat_template(config, prepared)
    if weights is None and config.init_from is not None:
        with contextlib.suppress(InputError):  # if it is gone, since resuming does not need it
            origin = tokenizer_folder(config.init_from)
    target = folder / names.TOKENIZER_FOLDER
    try:
        make_folder(target)
        for name, text in _contents(prepared, template, origin).items():
            path = target / name
            if not path.exists() or (name == _TEMPLATE and path.read_bytes() != text.encode()):
                write_atomically(path, text)
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).removesuffix(".")
        remedy = "Training continues; exports can add a tokenizer with export-hf --carry."
        print(f"Warning: the tokenizer could not be written to {target}: {reason}. {remedy}")


def _chat_template(config: Config, prepared: Prepared) -> str | None:
    """Return the chat template of the last phase that reads conversations; None if no phase does."""
    chats = {name for name, source in prepared.sources.items() if source.manifest.kind == "chat"}
    phases = [phase for phase in config.phases if chats.intersection(phase.mixture or prepared.sources)]
    if not phases:
        return None
    path = phases[-1].template
    return DEFAULT_TEMPLATE + _PROMPT if path is None else expanded(path).read_text(encoding="utf-8")


def _contents(prepared: Prepared, template: str | None, origin: Path | None) -> dict[str, str]:
    """Return name → content: the data's files, then those of `origin` if it has the same tokenizer, then new ones."""
    source, token_id = next(iter(prepared.sources.values())), prepared.tokenizer.token_id
    manifest = source.manifest
    raw = (source.folder / manifest.tokenizer.file).read_bytes()
    files, ids = _texts(source.folder) | {TOKENIZER: raw.decode("utf-8")}, dict[str, Any]()
    if origin is not None and (origin / TOKENIZER).is_file():
        if (origin / TOKENIZER).read_bytes() == raw:
            files, ids = _texts(origin) | files, known(special_ids(origin))
        else:
            problem = f"init_from has another tokenizer.json, {origin / TOKENIZER}, whose token ids may differ"
            print(printable(f"Warning: {problem} from those of the data. Prepare the data with it."))

    eos = manifest.eos or manifest.eot
    settings = names.tokenizer_settings(manifest.bos, eos, manifest.eot)
    if TOKENIZER_CONFIG in files:
        settings = _object(files[TOKENIZER_CONFIG])
    if template is not None:  # the model was trained with it, so it replaces the tokenizer's own
        files[_TEMPLATE] = template
        settings.pop("chat_template", None)
    if TOKENIZER_CONFIG not in files or template is not None:
        files[TOKENIZER_CONFIG] = json_text(settings)

    generation = ids | (known(_object(files[GENERATION])) if GENERATION in files else {})
    stops = generation.get("eos_token_id") or []
    stops = list(stops) if isinstance(stops, list) else [stops]
    is_builtin = template is not None and template.startswith(DEFAULT_TEMPLATE)
    for text in (manifest.eot, eos, *([_END_OF_TURN] if is_builtin else [])):  # those that end a text in training
        if (stop := token_id(text)) not in (None, *stops):
            stops.append(stop)
    bos = None if manifest.bos is None else token_id(manifest.bos)
    defaults = {"bos_token_id": bos, "pad_token_id": token_id(manifest.eot)}
    generation = defaults | generation | {"eos_token_id": stops[0] if len(stops) == 1 else stops}
    return files | {GENERATION: json_text(known(generation))}


def _object(text: str) -> dict[str, Any]:
    tree = json.loads(text)
    if not isinstance(tree, dict):
        raise InputError("tokenizer_config.json or generation_config.json is not a JSON object.")
    return tree


def _texts(folder: Path) -> dict[str, str]:
    """Read the text files of a tokenizer; binary ones (`tokenizer.model`) are not needed."""
    texts = [path for path in names.tokenizer_files(folder) if path.suffix in (".json", ".jinja", ".txt")]
    return {path.name: path.read_bytes().decode("utf-8") for path in texts}
