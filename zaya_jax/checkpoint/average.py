"""Several checkpoints of a run averaged into one."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from zaya_jax.checkpoint.digest import Part, read_slice
from zaya_jax.checkpoint.inspection import open_checkpoint, slices_of
from zaya_jax.checkpoint.manifest import Damaged
from zaya_jax.checkpoint.reader import CheckpointReader, verify_checkpoint
from zaya_jax.checkpoint.writer import write_checkpoint
from zaya_jax.errors import InputError

_AVERAGED = ("params.", "balance.")


def average_checkpoints(folders: Sequence[Path], output: Path) -> int:
    """Write a checkpoint whose parameters and balancing biases are the mean of those of several.

    What else a state has, such as the optimizer's moments, is that of the newest. Sums are fp64; two parts of an
    array are in memory at a time.

    Args:
      folders: of the checkpoints, at least two.
      output: a new run folder, which `init_from` takes.

    Returns:
      The step of the newest, which the new one has too.

    Raises:
      InputError: one is not what was saved, they have different arrays, or `output` cannot be written.
    """
    if len(folders) < 2:
        raise InputError(f"{len(folders)} checkpoint is given, but an average is of at least 2.")
    for folder in folders:
        if wrong := verify_checkpoint(folder):
            raise InputError(wrong[0])
    opened = sorted((open_checkpoint(folder) for folder in folders), key=lambda one: one[0].step)
    (newest, reader), others = opened[-1], opened[:-1]
    kinds = {name: (leaf["dtype"], leaf["shape"]) for name, leaf in newest.leaves.items()}
    for manifest, other in others:
        if {name: (leaf["dtype"], leaf["shape"]) for name, leaf in manifest.leaves.items()} != kinds:
            raise InputError(f"{other.folder} and {reader.folder} have different arrays, so they have no average.")
    slices = slices_of(reader.folder, newest)

    def parts() -> Iterator[Part]:
        for name in sorted(slices):
            for where in slices[name]:
                mean = name.startswith(_AVERAGED)
                yield Part(name, where, _mean([one for _, one in opened] if mean else [reader], name, where))

    about = {**newest.about, "averaged": [manifest.step for manifest, _ in opened], "heldout_loss": None}
    leaves = {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in kinds.items()}
    write_checkpoint(output / "checkpoints" / str(newest.step), newest.step, about, leaves, parts())
    return newest.step


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
