"""Several checkpoints of a run averaged into one."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from zaya_jax.checkpoint.digest import Part
from zaya_jax.checkpoint.environment import versions
from zaya_jax.checkpoint.inspection import open_checkpoint, saved_slices
from zaya_jax.checkpoint.reader import CheckpointReader, verify_checkpoint
from zaya_jax.checkpoint.writer import write_checkpoint
from zaya_jax.config import LoraConfig, ModelConfig, to_dict
from zaya_jax.errors import InputError
from zaya_jax.hf.adapters import (
    Read,
    abstract_model,
    base_fingerprint,
    bias_shapes,
    read_base,
    read_saved,
)
from zaya_jax.hf.interop import PARAMETERS_ALONE, architecture
from zaya_jax.hf.tensors import is_bias
from zaya_jax.model.lora import ADAPTED, adapter_names
from zaya_jax.model.tree import roles, shapes
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.run.digests import read_slice
from zaya_jax.run.manifest import Damaged, Manifest
from zaya_jax.run.tokenizer import copy_tokenizer, run_tokenizer

Opened = tuple[Manifest, CheckpointReader]
_AVERAGED = ("params.", "balance.")


def average_checkpoints(folders: Sequence[Path], output: Path, base: str | None = None) -> int:
    """Write a checkpoint whose parameters and balancing biases are the mean of those of several.

    What else a state has, such as the optimizer's moments, is that of the newest. Sums are fp64; two parts of an
    array are in memory at a time.

    Of adapters, the merged models are averaged, each W + scale·A·B not rounded: a mean of A times a mean of B is not
    the mean of A·B. What is written are parameters alone, in fp32 (fp64 for runs that computed in it).

    Args:
      folders: of the checkpoints, at least two.
      output: a new run folder, which `init_from` and `export_hf` take.
      base: what adapters are of; `init_from` of the newest's run where None.

    Returns:
      The step of the newest, which the new one has too.

    Raises:
      InputError: one is not what was saved, they have different arrays or adapters of different models, or
        `output` cannot be written.
    """
    if len(folders) < 2:
        raise InputError(f"{len(folders)} checkpoint is given, but an average is of at least 2.")
    for folder in folders:
        if wrong := verify_checkpoint(folder):
            raise InputError(wrong[0])
    opened = sorted((open_checkpoint(folder) for folder in folders), key=lambda one: one[0].step)
    newest, reader = opened[-1]
    target = output / "checkpoints" / str(newest.step)
    if any(manifest.metadata.get("config", {}).get("lora") for manifest, _ in opened):
        _average_adapters(opened, target, base)
    else:
        _average_parameters(opened, target)
    if (tokenizer := run_tokenizer(reader.folder)) is not None:
        copy_tokenizer(tokenizer, output)
    return newest.step


def _average_parameters(opened: Sequence[Opened], target: Path) -> None:
    (newest, reader), others = opened[-1], opened[:-1]
    kinds = {name: (leaf["dtype"], leaf["shape"]) for name, leaf in newest.leaves.items()}
    for manifest, other in others:
        if {name: (leaf["dtype"], leaf["shape"]) for name, leaf in manifest.leaves.items()} != kinds:
            raise InputError(f"{other.folder} and {reader.folder} have different arrays, so they have no average.")
    slices = saved_slices(reader.folder, newest)

    def parts() -> Iterator[Part]:
        for name in sorted(slices):
            for where in slices[name]:
                mean = name.startswith(_AVERAGED)
                yield Part(name, where, _mean([one for _, one in opened] if mean else [reader], name, where))

    about = {**newest.metadata, "averaged": [manifest.step for manifest, _ in opened], "heldout_loss": None}
    leaves = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in kinds.items()}
    write_checkpoint(target, newest.step, about, leaves, parts())


def _average_adapters(opened: Sequence[Opened], target: Path, base: str | None) -> None:
    _check_adapters(opened)
    newest, reader = opened[-1]
    model = architecture(newest.metadata)
    dtype = np.dtype(accumulation_dtype(newest.metadata["config"]["train"]["compute_dtype"]))
    mean = _merged_mean(opened, read_base(reader.folder, newest.metadata, model, base), model)
    sizes = {**shapes(abstract_model(model)), **bias_shapes(model)}
    names = {f"{'balance' if is_bias(name) else 'params'}.{name}": name for name in sizes}

    def parts() -> Iterator[Part]:
        for leaf, name in names.items():
            size = sizes[name]
            stacked = name.startswith("blocks.")
            for group in range(size[0]) if stacked else (None,):
                bounds = [(0, n) for n in size] if group is None else [(group, group + 1), *((0, n) for n in size[1:])]
                data = np.ascontiguousarray(mean(name, group), dtype)
                where = ",".join(f"{start}:{stop}" for start, stop in bounds)
                yield Part(leaf, where, data if group is None else data[None])

    about = {"config": {"model": to_dict(model)}, PARAMETERS_ALONE: True, "heldout_loss": None, "versions": versions(),
             "averaged": [manifest.step for manifest, _ in opened]}  # fmt: skip
    leaves = {leaf: {"dtype": dtype.name, "shape": list(sizes[name])} for leaf, name in names.items()}
    write_checkpoint(target, newest.step, about, leaves, parts())


def _check_adapters(opened: Sequence[Opened]) -> None:
    """Raise `InputError` unless all hold adapters of one model."""
    newest, reader = opened[-1]
    for manifest, other in opened:
        if not manifest.metadata.get("config", {}).get("lora"):
            raise InputError(f"{other.folder} holds all parameters, but others hold adapters: merge those first, with "
                             "export-hf and import-hf, and average the imported ones.")  # fmt: skip
        if manifest.metadata["config"]["model"] != newest.metadata["config"]["model"]:
            raise InputError(f"The models of {other.folder} and {reader.folder} differ, so they have no average.")
    bases = {other.folder: base_fingerprint(other.folder) for _, other in opened}
    for folder, found in bases.items():
        if found != bases[reader.folder]:
            raise InputError(
                f"The adapters in {folder} and {reader.folder} are of different models (fingerprints {found} and "
                f"{bases[reader.folder]}); average checkpoints whose runs began with the same init_from."
            )


def _merged_mean(opened: Sequence[Opened], frozen: Read, model: ModelConfig) -> Read:
    """The mean of merged models, in fp64: of balancing biases, and of each matrix with its adapters."""
    reads = [(read_saved(reader.folder), LoraConfig(**manifest.metadata["config"]["lora"]).scale / len(opened))
             for manifest, reader in opened]  # fmt: skip
    kinds = roles(abstract_model(model))

    def mean(name: str, group: int | None) -> np.ndarray:
        if is_bias(name):
            return np.asarray(np.mean([read(name, group) for read, _ in reads], axis=0, dtype=np.float64))
        total = frozen(name, group).astype(np.float64)
        for read, scale in reads if kinds[name] in ADAPTED else ():
            a, b = (read(one, group).astype(np.float64) for one in adapter_names(name))
            for expert in np.ndindex(a.shape[:-2]):  # one product at a time in memory
                total[expert] += scale * (a[expert] @ b[expert])
        return total

    return mean


def _mean(readers: Sequence[CheckpointReader], name: str, where: str) -> np.ndarray:
    try:
        found = [reader.read(name, read_slice(where)) for reader in readers]
    except Damaged as error:
        raise InputError(str(error)) from error
    if len(found) == 1:
        return found[0]
    total = found[0].astype(np.float64)
    for one in found[1:]:
        total += one
    return (total / len(found)).astype(found[0].dtype)
