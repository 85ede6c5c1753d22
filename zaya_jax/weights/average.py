"""Average several checkpoints into one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from zaya_jax.checkpoint.digest import ArrayPart
from zaya_jax.checkpoint.reader import saved_slices
from zaya_jax.checkpoint.writer import write_checkpoint
from zaya_jax.errors import InputError
from zaya_jax.hf.exporter import Read
from zaya_jax.model.lora import ADAPTED, adapter_names
from zaya_jax.model.tree import abstract_weights, is_balancing_bias, roles
from zaya_jax.model.zaya import abstract_model
from zaya_jax.run.checkpoints import CHECKPOINTS
from zaya_jax.run.digests import read_slice
from zaya_jax.run.tokenizer import copy_tokenizer
from zaya_jax.weights.interop import write_parameters
from zaya_jax.weights.load import AdaptedWeights
from zaya_jax.weights.sources import WEIGHTS, CheckpointWeights


def average_checkpoints(sources: Sequence[str | Path], output: Path, base: str | None = None) -> Path:
    """Write a checkpoint with the mean of the parameters and balancing biases of several checkpoints.

    The rest of the state, such as the optimizer's moments, comes from the newest checkpoint. Sums are fp64; two parts
    of an array are in memory at a time.

    For adapters, the merged models W + scale·A·B are averaged without rounding, because the mean of A times the mean of
    B is not the mean of A·B. The result has parameters only, in fp32 (fp64 for fp64 runs).

    The `sources`, at least two, are RUN_DIR, RUN_DIR@PHASE or RUN_DIR/checkpoints/STEP. `output` is a new run folder,
    which `init_from` and `export_hf` accept; the folder of its checkpoint is returned. `base` is the base model of the
    adapters; None uses `init_from` of the newest checkpoint's run. `InputError` if a checkpoint is damaged, their
    arrays or base models differ, or `output` cannot be written.
    """
    if len(sources) < 2:
        raise InputError(f"average got {len(sources)} checkpoint, but needs at least 2.")
    opened = [CheckpointWeights(source, "CHECKPOINT") for source in sources]
    for weights in opened:
        weights.verify()
    opened.sort(key=lambda weights: weights.manifest.step)
    full = [weights for weights in opened if not weights.holds_adapters]
    if 0 < len(full) < len(opened):
        advice = "Merge those with export-hf and import-hf first, then average the imported ones."
        raise InputError(f"{full[0].folder} contains all parameters, but other checkpoints contain adapters. {advice}")
    newest, averaged = opened[-1], [weights.manifest.step for weights in opened]
    target = output / CHECKPOINTS / str(newest.manifest.step)
    if full:
        _average_parameters(full, averaged, target)
    else:
        _average_adapters([AdaptedWeights(weights, base) for weights in opened], averaged, target)
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


def _average_adapters(adapted: Sequence[AdaptedWeights], averaged: list[int], target: Path) -> None:
    newest = adapted[-1]
    for weights in adapted:
        if weights.fingerprint != newest.fingerprint:
            differ = f"have different base models (fingerprints {weights.fingerprint} and {newest.fingerprint})"
            advice = "average checkpoints whose runs have the same init_from."
            raise InputError(f"The adapters in {weights.folder} and {newest.folder} {differ}; {advice}")
    dtypes = dict.fromkeys(abstract_weights(newest.config), np.dtype(newest.exact))
    write_parameters(target, newest.config, dtypes, _merged_mean(adapted), averaged=averaged)


def _merged_mean(adapted: Sequence[AdaptedWeights]) -> Read:
    """Return a reader of the mean of the merged models, in fp64."""
    frozen, kinds = adapted[-1].read_base, roles(abstract_model(adapted[-1].config))

    def mean(name: str, group: int | None) -> np.ndarray:
        if is_balancing_bias(name):
            biases = [weights.read(name, group) for weights in adapted]
            return np.asarray(np.mean(biases, axis=0, dtype=np.float64))
        total = frozen(name, group).astype(np.float64)
        for weights in adapted if kinds[name] in ADAPTED else ():
            a, b = (weights.adapters.read(adapter, group).astype(np.float64) for adapter in adapter_names(name))
            scale = weights.lora.scale / len(adapted)
            for expert in np.ndindex(a.shape[:-2]):  # one matmul at a time in memory
                total[expert] += scale * (a[expert] @ b[expert])
        return total

    return mean
