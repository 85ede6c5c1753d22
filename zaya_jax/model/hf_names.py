"""What a tensor of a `transformers` ZAYA folder is called and how it lies there, beside the module that owns it.

Linear weights are [out, in] there and [in, out] here (docs: zaya1.md §12.1); nothing is computed, so that a round trip
keeps every bit.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.errors import InputError

Change = Callable[[np.ndarray], np.ndarray]


class HfTensor(NamedTuple):
    """One tensor of a module.

    Attributes:
      name: its name there, behind that of the layer.
      path: attributes that lead to the parameter here, from the module that lists it.
      shape: its shape there.
      to_ours, to_theirs: between the two layouts.
      part: the slice of the parameter it fills, along its first axis; None for all of it.
    """

    name: str
    path: tuple[str, ...]
    shape: tuple[int, ...]
    to_ours: Change
    to_theirs: Change
    part: slice | None = None


def no_form(config: ModelConfig) -> Iterator[HfTensor]:
    """Refuse to name the tensors of a module that `transformers` does not have; takes the place of `hf_tensors`."""
    raise InputError(f"transformers has no model with model.attention={config.attention} and "
                     f"model.router={config.router}, so it cannot be imported or exported.")  # fmt: skip


def unchanged(x: np.ndarray) -> np.ndarray:
    """`x` itself: the layouts are the same."""
    return x


def transposed(x: np.ndarray) -> np.ndarray:
    """A view of `x` with its last two axes exchanged."""
    return np.swapaxes(x, -1, -2)


def same(name: str, path: str, *shape: int, part: slice | None = None) -> HfTensor:
    """A tensor that lies there as it does here; `path` is dotted."""
    return HfTensor(name, tuple(path.split(".")), shape, unchanged, unchanged, part)


def linear(name: str, path: str, *shape: int) -> HfTensor:
    """A tensor whose `shape` there is [..., out, in]."""
    return HfTensor(name, tuple(path.split(".")), shape, transposed, transposed)


def within(attribute: str, tensor: HfTensor) -> HfTensor:
    """`tensor` of a module, seen from the one that holds it as `attribute`."""
    return tensor._replace(path=(attribute, *tensor.path))
