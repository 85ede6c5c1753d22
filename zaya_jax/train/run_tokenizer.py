"""Write the tokenizer of a run's data to `RUN_DIR/tokenizer/`."""

from collections.abc import Callable
from pathlib import Path

from zaya_jax.config import Config
from zaya_jax.data.chat import DEFAULT_TEMPLATE
from zaya_jax.data.sources import Prepared
from zaya_jax.errors import InputError
from zaya_jax.run import tokenizer as files
from zaya_jax.run.files import expanded
from zaya_jax.weights.load import tokenizer_folder
from zaya_jax.weights.sources import Weights

# Training renders complete conversations, so the built-in template has no generation prompt.
_PROMPT = "{% if add_generation_prompt %}\n<|im_start|>assistant\n{% endif %}\n"
_END_OF_TURN = "<|im_end|>"  # of the built-in template


def write_tokenizer(folder: Path, config: Config, prepared: Prepared, weights: Weights | None = None,
                    say: Callable[[str], object] = print) -> None:  # fmt: skip
    """Write the tokenizer files that are missing in the run folder, see `run.tokenizer.write_tokenizer_files`.

    `weights` are those of `init_from`, if the run has opened them.
    """
    source = next(iter(prepared.sources.values()))
    manifest, template = source.manifest, _chat_template(config, prepared)
    builtin = template is not None and template.startswith(DEFAULT_TEMPLATE)
    eos, origin = manifest.eos or manifest.eot, _init_folder(config) if weights is None else weights.tokenizer
    stops, token_id = (manifest.eot, eos, *([_END_OF_TURN] if builtin else [])), prepared.tokenizer.token_id
    tokenizer = files.TrainedTokenizer(
        source.folder, manifest.tokenizer.file, token_id, manifest.bos, eos, stops, template, origin
    )
    files.write_tokenizer_files(folder, tokenizer, say)


def _init_folder(config: Config) -> Path | None:
    """Return the folder of `init_from`'s tokenizer; None if it is gone, since resuming does not need it."""
    try:
        return None if config.init_from is None else tokenizer_folder(config.init_from)
    except InputError:
        return None


def _chat_template(config: Config, prepared: Prepared) -> str | None:
    """Return the chat template of the last phase that reads conversations; None if no phase does."""
    chats = {name for name, source in prepared.sources.items() if source.manifest.kind == "chat"}
    phases = [phase for phase in config.phases if chats.intersection(phase.mixture or prepared.sources)]
    if not phases:
        return None
    path = phases[-1].template
    return DEFAULT_TEMPLATE + _PROMPT if path is None else expanded(path).read_text(encoding="utf-8")
