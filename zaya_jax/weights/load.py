"""Open weights from any source: a run, RUN_DIR@PHASE, a checkpoint, adapters on their base, or hf:FOLDER."""

import functools
import os
from pathlib import Path

import jax
import jax.numpy as jnp

from zaya_jax.config import LoraConfig
from zaya_jax.config.weight_source import HF, parse_source
from zaya_jax.data.tokenizer import Tokenizer
from zaya_jax.errors import InputError
from zaya_jax.model.zaya import Zaya
from zaya_jax.run.checkpoints import checkpoint_folder
from zaya_jax.run.files import expanded
from zaya_jax.run.tokenizer import run_tokenizer
from zaya_jax.weights.adapters import AdaptedWeights
from zaya_jax.weights.sources import CheckpointWeights, FolderWeights, Weights


def open_weights(source: str | Path, what: str = "path", base: str | None = None) -> Weights:
    """Open weights without reading their values.

    Args:
      source: RUN_DIR for its newest checkpoint, RUN_DIR@PHASE for the last one of a phase, RUN_DIR/checkpoints/STEP,
        or hf:FOLDER for a `transformers` folder.
      what: the key or argument that `source` comes from, for messages.
      base: base model of adapters; None uses `init_from` of their run.

    Raises:
      InputError: the source does not exist, or its metadata shows damage.
    """
    parsed = parse_source(str(source))
    if parsed.kind == "transformers":
        return FolderWeights(str(source), Path(parsed.path))
    if is_transformers(source):
        raise InputError(f"{what} is {str(source)!r}, which looks like a transformers folder; write {HF}{source}.")
    checkpoint = open_checkpoint_weights(source, what)
    return merge_adapters(checkpoint, base) if checkpoint.holds_adapters else checkpoint


def is_transformers(source: str | Path) -> bool:
    """Return whether a source is hf:FOLDER, or a `transformers` folder that is named without hf:."""
    return parse_source(str(source)).kind == "transformers" or os.path.isfile(expanded(source) / "config.json")


def open_folder_weights(source: str | Path) -> FolderWeights:
    """Open the weights of a `transformers` folder: FOLDER or hf:FOLDER."""
    return FolderWeights(str(source), Path(parse_source(str(source)).path))


def open_checkpoint_weights(source: str | Path, what: str) -> CheckpointWeights:
    """Open the weights of a checkpoint without merging adapters; see `open_weights`."""
    return CheckpointWeights(str(source), checkpoint_folder(str(source), what))


def merge_adapters(adapters: CheckpointWeights, base: str | None) -> AdaptedWeights:
    """Merge the adapters of a checkpoint into their base model; see `open_weights`."""
    config = adapters.manifest.metadata["config"]
    try:
        source, key = base or config["init_from"], "--base" if base else "init_from"
        lora = LoraConfig(**config["lora"])
    except (KeyError, TypeError) as error:
        raise InputError(f"The manifest of {adapters.folder} does not describe its adapters: {error}.") from error
    weights = AdaptedWeights(adapters, lora, functools.partial(open_weights, source, key))
    if weights.tokenizer is None:
        weights.tokenizer = tokenizer_folder(source)
    return weights


def load_model(source: str | Path, dtype: jax.typing.DTypeLike | None = jnp.float32) -> tuple[Zaya, Tokenizer | None]:
    """Load a model onto this process's first device; adapters are merged into their base model.

    Args:
      source: see `open_weights`.
      dtype: see `Weights.load_model`.

    Returns:
      The model, and its tokenizer or None if there is no `tokenizer.json`.

    Raises:
      InputError: the model is missing or damaged, or its tokenizer cannot be used.
    """
    weights = open_weights(source)
    tokenizer = weights.load_tokenizer()
    return weights.load_model(dtype), tokenizer


def tokenizer_folder(source: str) -> Path | None:
    """Return the tokenizer folder of a source without opening its weights; raises like `open_weights`."""
    parsed = parse_source(source)
    if parsed.kind == "transformers":
        return expanded(parsed.path)
    return run_tokenizer(checkpoint_folder(source))
