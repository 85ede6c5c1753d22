"""Convert weights from and to `transformers` folders, part by part from disk to disk, without devices."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax.checkpoint.digest import ArrayPart
from zaya_jax.checkpoint.environment import versions
from zaya_jax.checkpoint.writer import write_checkpoint
from zaya_jax.config import ModelConfig, to_dict
from zaya_jax.config.weight_source import HF
from zaya_jax.errors import InputError
from zaya_jax.hf.exporter import Layout, Read, write_folder
from zaya_jax.hf.peft import write_peft_folder
from zaya_jax.model.tree import abstract_weights, is_balancing_bias
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.digests import slice_text
from zaya_jax.run.files import expanded
from zaya_jax.run.tokenizer import TOKENIZER, copy_tokenizer, special_ids
from zaya_jax.weights.card import model_card
from zaya_jax.weights.load import AdaptedWeights, open_weights
from zaya_jax.weights.sources import PARAMETERS_ONLY, FolderWeights, saved_name, stack_groups


def import_hf(source: str | Path, output: Path, allow_nonfinite: bool = False) -> str:
    """Write FOLDER or hf:FOLDER, in either layout, as a checkpoint of step 0 of a new run, in the stored dtype; say so.

    Raises like `open_folder` and `write_checkpoint`; `InputError` if a tensor is not finite, unless `allow_nonfinite`.
    """
    weights, output = FolderWeights(source), expanded(output)
    special_ids(weights.folder)  # raises before anything is written
    exact = {name: np.dtype(np.float32) for name in weights.dtypes if is_balancing_bias(name)}
    dtypes = {**weights.dtypes, **exact}

    def read(name: str, group: int | None) -> np.ndarray:
        if not allow_nonfinite:
            weights.check_finite(name, group, dtypes[name], "pass --allow-nonfinite to import it anyway")
        return weights.read(name, group)

    write_parameters(output / CHECKPOINTS / "0", weights.config, dtypes, read)
    copy_tokenizer(weights.folder, output)
    return f"Imported {weights.folder} into {output / CHECKPOINTS / '0'}."


def export_hf(
    source: str, folder: Path, dtype: str, layout: Layout = "hf", carry: Path | None = None, base: str | None = None
) -> str:
    """Write weights as a folder that `transformers` loads; adapters are merged into their base model. Say so.

    See `open_weights` for `source` and `base`, `write_folder` for the others; without `carry`, the tokenizer and
    generation files are those of the source. `InputError` if the weights are damaged; also raises like `write_folder`.
    """
    weights = open_weights(source, "CHECKPOINT", base)
    weights.verify()
    card = model_card(weights, folder, dtype, layout)
    write_folder(folder, weights.config, weights.read, dtype, layout, carry or weights.tokenizer, card)
    hint = "" if (folder / TOKENIZER).exists() else " It has no tokenizer; add one with --carry FOLDER."
    return f"Exported {weights.folder} to {folder} in {dtype}.{hint}"


def export_peft(source: str, folder: Path, dtype: str, carry: Path | None = None, base: str | None = None) -> str:
    """Write the adapters of a run as a folder that `peft` loads onto their base model, and say so; see `export_hf`.

    The base model must be hf:FOLDER: `peft` loads it from FOLDER. `InputError` if there are no adapters, they are
    damaged, or their run differs from the base model in more than them.
    """
    weights = open_weights(source, "CHECKPOINT", base)
    if not isinstance(weights, AdaptedWeights):
        raise InputError(f"{source} was trained without adapters (lora.rank), so it cannot be exported with --peft.")
    weights.verify()
    path, carry = _peft_base(weights), carry or weights.tokenizer
    card = model_card(weights, folder, dtype, "peft", path)
    write_peft_folder(folder, weights.config, weights.lora, path, weights.adapters.read, dtype, carry, card)
    return f"Exported the adapters of {weights.folder} to {folder} in {dtype}; peft loads their base model from {path}."


def _peft_base(weights: AdaptedWeights) -> str:
    """Return the folder of the base model as the user named it; InputError if it is not what the adapters need."""
    base, problems, remedy = weights.base, [], ""
    if not isinstance(base, FolderWeights) or base.is_legacy:
        problem = "has the legacy layout" if isinstance(base, FolderWeights) else "is not a transformers folder"
        problems.append(f"--peft needs the base model as a transformers folder, but {base.source} {problem}.")
        remedy = f"Export it with export-hf {base.source} FOLDER --dtype float32, then pass --base hf:FOLDER."
    for key in ("rope_base", *(["sliding_rope_base"] if "sliding" in base.config.layer_pattern else [])):
        ours, theirs = getattr(weights.config, key), getattr(base.config, key)
        if ours != theirs:
            other = f"the base model {base.source} has {theirs:g}, which a PEFT folder cannot change"
            problems.append(f"The adapters were trained with {key} {ours:g}, but {other}.")
            remedy = "Export without --peft."
    shapes = {name: x.shape for name, x in abstract_weights(weights.config).items() if is_balancing_bias(name)}
    biases = ((name, group) for name, shape in shapes.items() for group in stack_groups(name, shape))
    if trained := next((x for x in biases if not np.array_equal(weights.read(*x), weights.read_base(*x))), None):
        problems.append(f"The run trained its balancing biases ({trained[0]}), which a PEFT folder cannot hold.")
        remedy = "Export without --peft."
    if problems:
        raise InputError(" ".join([*problems, remedy]))
    return base.source.removeprefix(HF)


def write_parameters(
    folder: Path, config: ModelConfig, dtypes: Mapping[str, np.dtype], read: Read, **metadata: Any
) -> None:
    """Write a checkpoint without optimizer state, for `init_from` and `open_weights`, to RUN_DIR/checkpoints/STEP.

    `read` (see `Weights.read`) returns parameters and balancing biases, which are written with `dtypes`, by name.
    Memory holds one layer of one parameter at a time. `metadata` is added to that of the checkpoint. Raises like
    `write_checkpoint`.
    """
    abstract = abstract_weights(config)

    def parts() -> Iterator[ArrayPart]:
        for name, x in abstract.items():
            full = (slice(None),) * len(x.shape)
            for group in stack_groups(name, x.shape):
                value = np.ascontiguousarray(read(name, group), dtypes[name])
                index = full if group is None else (slice(group, group + 1), *full[1:])
                yield ArrayPart(saved_name(name), slice_text(index, x.shape), value if group is None else value[None])

    leaves = {saved_name(name): {"dtype": dtypes[name].name, "shape": list(x.shape)} for name, x in abstract.items()}
    own = {"config": {"model": to_dict(config)}, PARAMETERS_ONLY: True, "heldout_loss": None, "versions": versions()}
    write_checkpoint(folder, int(folder.name), own | metadata, leaves, parts())
