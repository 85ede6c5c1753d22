"""Names and layouts of a module's tensors in a `transformers` ZAYA folder.

Linear weights are [out, in] there and [in, out] here (docs/reference.md §12.1). Conversions only move values, so a
round trip is bitwise exact.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.errors import InputError

Change = Callable[[np.ndarray], np.ndarray]


class HfTensor(NamedTuple):
    """One tensor of a module in a `transformers` folder."""

    name: str  # its name there, after the prefix of the layer
    path: tuple[str, ...]  # attributes from the module to the parameter here
    shape: tuple[int, ...]  # its shape there
    to_ours: Change  # converts its layout to the parameter's
    to_theirs: Change  # converts the parameter's layout to its
    part: slice | None = None  # slice of the parameter that it fills, along the first axis; None for all of it


def no_form(config: ModelConfig) -> Iterator[HfTensor]:
    """Raise `InputError`: the `hf_tensors` of modules that `transformers` does not have."""
    form = f"model.attention={config.attention} and model.router={config.router}"
    raise InputError(f"transformers has no model with {form}, so it cannot be imported or exported.")


def unchanged(x: np.ndarray) -> np.ndarray:
    """Return `x`, for tensors with the same layout."""
    return x


def transposed(x: np.ndarray) -> np.ndarray:
    """Return a view of `x` with its last two axes swapped."""
    return np.swapaxes(x, -1, -2)


def same(name: str, path: str, *shape: int, part: slice | None = None) -> HfTensor:
    """Describe a tensor with the same layout there and here; `path` is dotted."""
    return HfTensor(name, tuple(path.split(".")), shape, unchanged, unchanged, part)


def linear(name: str, path: str, *shape: int) -> HfTensor:
    """Describe a linear weight, whose `shape` there is [..., out, in]; `path` is dotted."""
    return HfTensor(name, tuple(path.split(".")), shape, transposed, transposed)


def reshaped(name: str, path: str, theirs: tuple[int, ...], split: tuple[int, ...], order: tuple[int, ...]) -> HfTensor:
    """Describe a tensor of shape `theirs` whose axes, once it is reshaped to `split`, are in this `order` here."""
    back = np.argsort(order)
    return HfTensor(name, (path,), theirs, lambda x: x.reshape(split).transpose(order),
                    lambda x: x.transpose(back).reshape(theirs))  # fmt: skip


def within(attribute: str, tensor: HfTensor) -> HfTensor:
    """Prefix the path of a submodule's `tensor` with `attribute`, under which its parent holds it."""
    return tensor._replace(path=(attribute, *tensor.path))
