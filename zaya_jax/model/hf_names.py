"""Names and layouts of a module's tensors in a `transformers` ZAYA folder.

Linear weights are [out, in] there and [in, out] here (docs/reference.md §12.1). Conversions only move values, so a
round trip is bitwise exact.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from zaya_jax.config import ModelConfig
from zaya_jax.errors import InputError

Change = Callable[[np.ndarray], np.ndarray]


class HfTensor(NamedTuple):
    """One tensor of a module in a `transformers` folder."""

    name: str  # its name there; a layer's module leaves out the prefix of the layer
    leaf: str  # dotted name of the parameter here, from the module on
    shape: tuple[int, ...]  # its shape there
    to_ours: Change  # converts its layout to the parameter's
    to_theirs: Change  # converts the parameter's layout to its
    part: slice | None = None  # slice of the parameter that it fills, along the first axis; None for all of it
    group: int | None = None  # index in the parameter's stack of layers; None if it is not stacked


def no_form(config: ModelConfig) -> Iterator[HfTensor]:
    """Raise `InputError`: the `hf_tensors` of modules that `transformers` does not have."""
    form = f"model.attention={config.attention} and model.router={config.router}"
    raise InputError(f"transformers has no model with {form}, so it cannot be imported or exported.")


def transposed(x: np.ndarray) -> np.ndarray:
    """Return a view of `x` with its last two axes swapped."""
    return np.swapaxes(x, -1, -2)


def same(name: str, leaf: str, *shape: int, part: slice | None = None) -> HfTensor:
    """Describe a tensor with the same layout there and here."""
    return HfTensor(name, leaf, shape, np.asarray, np.asarray, part)


def linear(name: str, leaf: str, *shape: int) -> HfTensor:
    """Describe a linear weight, whose `shape` there is [..., out, in]."""
    return HfTensor(name, leaf, shape, transposed, transposed)


def reshaped(name: str, leaf: str, theirs: tuple[int, ...], split: tuple[int, ...], order: tuple[int, ...]) -> HfTensor:
    """Describe a tensor of shape `theirs` whose axes, once it is reshaped to `split`, are in this `order` here."""
    ours, back = lambda x: x.reshape(split).transpose(order), np.argsort(order)
    return HfTensor(name, leaf, theirs, ours, lambda x: x.transpose(back).reshape(theirs))


def within(attribute: str, tensors: Iterable[HfTensor]) -> Iterator[HfTensor]:
    """Prefix the leaves of a submodule's tensors with `attribute`, under which its parent holds it."""
    return (tensor._replace(leaf=f"{attribute}.{tensor.leaf}") for tensor in tensors)
