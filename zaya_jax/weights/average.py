"""Average several checkpoints into one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax.checkpoint.digest import ArrayPart
from zaya_jax.checkpoint.reader import saved_slices
from zaya_jax.checkpoint.writer import write_checkpoint
from zaya_jax.errors import InputError
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.digests import read_slice
from zaya_jax.run.tokenizer import copy_tokenizer
from zaya_jax.weights.sources import WEIGHTS, CheckpointWeights


def average_checkpoints(sources: Sequence[str | Path], output: Path) -> Path:
    """Write a checkpoint with the mean of the parameters and balancing biases of several checkpoints.

    The rest of the state, such as the optimizer's moments, comes from the newest checkpoint. Sums are fp64; a part of
    an array is in memory at a time.

    The `sources`, at least two, are RUN_DIR, RUN_DIR@PHASE or RUN_DIR/checkpoints/STEP. `output` is a new run folder,
    which `init_from` and `export_hf` accept; the folder of its checkpoint is returned. `InputError` if a checkpoint is
    damaged or has adapters, their arrays differ, or `output` cannot be written.
    """
    if len(sources) < 2:
        raise InputError(f"average got {len(sources)} checkpoint, but needs at least 2.")
    opened = [CheckpointWeights(source, "CHECKPOINT") for source in sources]
    for weights in opened:
        if weights.holds_adapters:  # the mean of A times the mean of B is not the mean of A·B
            merge = "Merge each of them with export-hf --dtype float32 and import-hf, then average the imported ones."
            raise InputError(f"{weights.folder} contains adapters, which have no average. {merge}")
        weights.verify()
    opened.sort(key=lambda weights: weights.manifest.step)
    newest, averaged = opened[-1], [weights.manifest.step for weights in opened]
    target = output / CHECKPOINTS / str(newest.manifest.step)
    _average_parameters(opened, averaged, target)
    if newest.tokenizer is not None:
        copy_tokenizer(newest.tokenizer, output)
    return target


def _average_parameters(checkpoints: Sequence[CheckpointWeights], averaged: list[int], target: Path) -> None:
    def arrays(checkpoint: CheckpointWeights) -> dict[str, Any]:
        leaves = checkpoint.manifest.leaves
        return {name: {"dtype": leaf["dtype"], "shape": leaf["shape"]} for name, leaf in leaves.items()}

    newest = checkpoints[-1]
    for checkpoint in checkpoints:
        if arrays(checkpoint) != arrays(newest):
            raise InputError(f"{checkpoint.folder} and {newest.folder} cannot be averaged: their arrays differ.")
    slices = saved_slices(newest.folder, newest.manifest)

    def parts() -> Iterator[ArrayPart]:
        for name in sorted(slices):
            for span in slices[name]:
                yield ArrayPart(name, span, _mean(checkpoints if name.startswith(WEIGHTS) else [newest], name, span))

    metadata = {**newest.manifest.metadata, "averaged": averaged, "heldout_loss": None}
    write_checkpoint(target, newest.manifest.step, metadata, arrays(newest), parts())


def _mean(checkpoints: Sequence[CheckpointWeights], name: str, span: str) -> np.ndarray:
    first = checkpoints[0].reader.read(name, read_slice(span))
    if len(checkpoints) == 1:
        return first
    total = first.astype(np.float64)
    for checkpoint in checkpoints[1:]:
        total += checkpoint.reader.read(name, read_slice(span))
    return (total / len(checkpoints)).astype(first.dtype)
