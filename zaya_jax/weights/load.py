"""The one door: `open_weights` of a run, RUN@PHASE, a checkpoint, adapters on their base, or hf:FOLDER."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from zaya_jax.config import LoraConfig
from zaya_jax.config.weight_source import HF, parse_source
from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.errors import InputError
from zaya_jax.model.zaya import Zaya
from zaya_jax.run.checkpoints import checkpoint_folder
from zaya_jax.run.tokenizer import run_tokenizer
from zaya_jax.weights.adapters import AdaptedWeights
from zaya_jax.weights.sources import CheckpointWeights, FolderWeights, Weights


def open_weights(source: str | Path, what: str = "path", base: str | None = None) -> Weights:
    """Open weights; their values are read later.

    Args:
      source: RUN_DIR for its newest checkpoint, RUN_DIR@PHASE for the last one of a phase, RUN_DIR/checkpoints/STEP,
        or hf:FOLDER for a `transformers` folder.
      what: the key or argument that names the source, for messages.
      base: what adapters were trained on; `init_from` of their run where None.

    Raises:
      InputError: there is nothing of the kind, or it is damaged as far as that is known without reading values.
    """
    parsed = parse_source(str(source))
    if parsed.kind == "transformers":
        return FolderWeights(str(source), Path(parsed.path))
    if (Path(source).expanduser() / "config.json").is_file():
        raise InputError(f"{what} is {str(source)!r}, which looks like a transformers folder; write {HF}{source}.")
    checkpoint = open_checkpoint_weights(source, what)
    return merge_adapters(checkpoint, base) if checkpoint.holds_adapters else checkpoint


def open_folder_weights(source: str | Path) -> FolderWeights:
    """Open those of a `transformers` folder: FOLDER or hf:FOLDER, where it can be nothing else."""
    return FolderWeights(str(source), Path(parse_source(str(source)).path))


def open_checkpoint_weights(source: str | Path, what: str) -> CheckpointWeights:
    """Open those of a checkpoint, adapters alone where it holds these; see `open_weights`."""
    return CheckpointWeights(str(source), checkpoint_folder(str(source), what))


def merge_adapters(adapters: CheckpointWeights, base: str | None) -> AdaptedWeights:
    """Those of a checkpoint of adapters, merged into what they were trained on; see `open_weights`."""
    config = adapters.manifest.metadata["config"]
    try:
        open_base = functools.partial(open_weights, base or config["init_from"], "--base" if base else "init_from")
        return AdaptedWeights(adapters, LoraConfig(**config["lora"]), open_base)
    except (KeyError, TypeError) as error:
        raise InputError(f"The manifest of {adapters.folder} does not describe its adapters: {error}.") from error


def load_model(source: str | Path, dtype: jax.typing.DTypeLike | None = jnp.float32) -> tuple[Zaya, Tokenizer | None]:
    """Load a model onto this process's first device; adapters are merged into what they were trained on.

    Args:
      source: see `open_weights`.
      dtype: see `Weights.load_model`.

    Returns:
      The model, and its tokenizer; None where there is no `tokenizer.json`.

    Raises:
      InputError: there is no such model, it is damaged, or its tokenizer cannot be used.
    """
    weights = open_weights(source)
    tokenizer = weights.load_tokenizer()
    return weights.load_model(dtype), tokenizer


def tokenizer_folder(source: str) -> Path | None:
    """Where the tokenizer of a source is, without opening its weights; see `open_weights` for what is raised."""
    parsed = parse_source(source)
    if parsed.kind == "transformers":
        return Path(parsed.path).expanduser()
    return run_tokenizer(checkpoint_folder(source))
