"""A `transformers` folder as a checkpoint, without devices: part by part from disk to disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from zaya_jax.checkpoint.digest import Part
from zaya_jax.checkpoint.environment import versions
from zaya_jax.checkpoint.finite import is_finite, not_finite
from zaya_jax.checkpoint.writer import write_checkpoint
from zaya_jax.config import to_dict
from zaya_jax.hf.folder import Folder, open_folder
from zaya_jax.hf.tensors import is_bias
from zaya_jax.model.router import INERT
from zaya_jax.run.checkpoints import FOLDER
from zaya_jax.run.tokenizer import copy_tokenizer, special_ids

PARAMETERS_ONLY = "parameters_alone"  # in the metadata of a checkpoint without an optimizer's state


def import_hf(path: Path, output: Path, allow_nonfinite: bool = False) -> str:
    """Write the parameters of a folder as a checkpoint of step 0, in the dtype they are stored in.

    `init_from` takes it, and so do the commands. Two tensors are in memory at a time.

    Args:
      path: of the folder, in either layout.
      output: a new run folder.
      allow_nonfinite: import NaN and infinite values too.

    Returns:
      A sentence that says what was written.

    Raises:
      InputError: a tensor holds NaN or infinite values (it is named); see `open_folder` and `write_checkpoint`.
    """
    folder = open_folder(path)
    special_ids(folder.path)  # raises, before anything is written
    leaves = _leaves(folder)
    about = {"config": {"model": to_dict(folder.config)}, PARAMETERS_ONLY: True, "heldout_loss": None,
             "versions": versions()}  # fmt: skip
    target = output.expanduser() / FOLDER / "0"
    write_checkpoint(target, 0, about, leaves, _parts(folder, leaves, allow_nonfinite))
    copy_tokenizer(folder.path, output.expanduser())
    return f"Imported {len(folder.tensors)} tensors from {path} into {target}."


def saved_name(name: str) -> str:
    """The name in a checkpoint of a parameter or balancing bias."""
    return f"{'balance' if is_bias(name) else 'params'}.{name}"


def _leaves(folder: Folder) -> dict[str, dict[str, Any]]:
    """Dtype and shape of each parameter: those of its tensors side by side in its stack."""
    shapes: dict[str, tuple[str, list[int]]] = {}
    for tensor in folder.tensors:
        shape = list(tensor.to_ours(np.broadcast_to(np.uint8(0), tensor.shape)).shape)
        if tensor.part is not None:
            shape[0] = tensor.part.stop
        if tensor.group is not None:
            shape = [tensor.group + 1, *shape]
        dtype = "float32" if is_bias(tensor.leaf) else folder.stored[tensor.name].dtype.name
        before = shapes.get(tensor.leaf, (dtype, shape))[1]
        shapes[tensor.leaf] = dtype, [max(one, other) for one, other in zip(before, shape, strict=True)]
    if INERT not in shapes:  # a stack that holds the first layer alone
        shapes[INERT] = shapes["embedding"][0], [1, folder.config.router_size]
    return {saved_name(leaf): {"dtype": dtype, "shape": shape} for leaf, (dtype, shape) in shapes.items()}


def _parts(folder: Folder, leaves: dict[str, dict[str, Any]], allow_nonfinite: bool) -> Iterator[Part]:
    gamma = leaves[saved_name(INERT)]
    ones = np.ones((1, *gamma["shape"][1:]), _dtype(gamma["dtype"]))
    yield Part(saved_name(INERT), f"0:1,0:{gamma['shape'][1]}", ones)
    for tensor in folder.tensors:
        stored = folder.stored[tensor.name].open()
        data = tensor.to_ours(stored)
        bounds = [(0, size) for size in data.shape]
        if tensor.part is not None:
            bounds[0] = (tensor.part.start, tensor.part.stop)
        if tensor.group is not None:
            data, bounds = data[None], [(tensor.group, tensor.group + 1), *bounds]
        where = ",".join(f"{start}:{stop}" for start, stop in bounds)
        wanted = _dtype(leaves[saved_name(tensor.leaf)]["dtype"])
        with np.errstate(over="ignore"):  # which is found below
            data = np.ascontiguousarray(data, wanted)
        if not allow_nonfinite and not is_finite(data):
            raise not_finite(f"The tensor {tensor.name} in {folder.path}", stored, wanted,
                             "--allow-nonfinite imports it as it is")  # fmt: skip
        yield Part(saved_name(tensor.leaf), where, data)


def _dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
