"""The one door: `open_weights` of a run, RUN@PHASE, a checkpoint, adapters on their base, or hf:FOLDER."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from zaya_jax.config import LoraConfig
from zaya_jax.config.schema import HF
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
    source = str(source)
    if (folder := _transformers_folder(source)) is not None:
        return FolderWeights(source, folder)
    if (Path(source).expanduser() / "config.json").is_file():
        raise InputError(f"{what} is {source!r}, which looks like a transformers folder; write {HF}{source}.")
    return open_checkpoint_weights(source, what, base)


def open_checkpoint_weights(source: str, what: str, base: str | None) -> CheckpointWeights | AdaptedWeights:
    """Open those of a checkpoint, see `open_weights`."""
    checkpoint = CheckpointWeights(source, checkpoint_folder(source, what))
    config = checkpoint.manifest.metadata["config"]
    if config.get("lora") is None:
        return checkpoint
    try:
        open_base = functools.partial(open_weights, base or config["init_from"], "--base" if base else "init_from")
        return AdaptedWeights(checkpoint, LoraConfig(**config["lora"]), open_base)
    except (KeyError, TypeError) as error:
        raise InputError(f"The manifest of {checkpoint.folder} does not describe its adapters: {error}.") from error


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
    return _transformers_folder(source) or run_tokenizer(checkpoint_folder(source))


def _transformers_folder(source: str) -> Path | None:
    return Path(source.removeprefix(HF)).expanduser() if source.startswith(HF) else None
