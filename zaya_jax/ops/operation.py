"""The definition of an operation: a reference, kernels in order of preference, and checks that kernels must pass."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tiles import PLATFORMS
from zaya_jax.config import ModelConfig

# Largest relative error (norm of the difference / norm of the exact result) over outputs and gradients. It allows a few
# roundings of the dtype, whose relative error is 6e-8 (fp32) or 4e-3 (bf16); TF32 matmuls, 5e-4, pass as fp32.
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))  # that kernels support
ROWS = 384  # tokens in a check: several tiles of every kernel, the last one partial


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An implementation of an operation for some platforms."""

    name: str  # unique among the kernels of its operation
    run: Callable[..., Any]  # takes the `pallas_kernels.tiles.Architecture`, then the arguments of the reference
    # takes the same arguments, and returns '' if `run` supports their shapes, dtypes and static values, else a sentence
    # that says why not
    supports: Callable[..., str]
    tiles: tuple[str, ...]  # names of its tiles in `pallas_kernels.tiles.TILES`, in the order to time them
    platforms: tuple[str, ...] = PLATFORMS  # platforms that have it
    module: str = ""  # that the kernel is from; '' for the one of the operation
    # the kernel that a program compiled without a GPU has in its place, if it is of a library that needs one; '' if not
    stand_in: str = ""


class Input(NamedTuple):
    """An array of a check: normally distributed, with this shape, standard deviation and mean."""

    shape: tuple[int, ...]
    scale: float = 1.0
    mean: float = 0.0


class Check(NamedTuple):
    """One way to compare an implementation of an operation with its reference."""

    run: Callable[..., Any]  # takes an implementation of the operation, then the arrays, and returns its outputs
    inputs: tuple[Input, ...]  # descriptions of the arrays, which are rounded to the checked dtype for both sides
    # number of leading arrays whose rows can be repeated, to make them large; 0 if there are always few. Outputs are
    # then repeated, too; without a gradient, an output may instead be a sum over rows, which grows by the repeats.
    rows: int
    gradient: bool = True  # whether to check the gradient of each array, too
    tolerance: Mapping[str, float] = TOLERANCE  # largest relative error, by dtype


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the model or the optimizer."""

    name: str  # key in `registry.OPERATIONS`, and the field of `Ops` if the model calls it directly
    reference: Callable[..., Any]  # plain JAX for any device and dtype; defines the correct result
    # (model, whether it is trained) → checks by name, at the model's widths; {} if it is not used
    checks: Callable[[ModelConfig, bool], dict[str, Check]]
    kernels: tuple[Kernel, ...] = ()  # in order of preference
    uses: tuple[str, ...] = ()  # other operations that the reference takes as keyword arguments of the same names
    # arguments of the reference → its size: first the rows that a measurement depends on (tokens, those of a group or
    # of a sequence), then widths that are the same throughout a model
    shape: Callable[..., tuple[int, ...]] = lambda *_, **__: (1,)
    measured_as: str = ""  # the operation whose measurements apply to this one, too; '' for its own
    step_of: str = ""  # the operation in whose place decode steps use this one, which has no gradient; '' for others

    @property
    def modules(self) -> tuple[str, ...]:
        """Modules on which measurements depend: its own, and those of its kernels."""
        return self.reference.__module__, *(kernel.module for kernel in self.kernels if kernel.module)

    def kernels_for(self, platform: str) -> list[Kernel]:
        """Return the kernels for a platform, in order of preference."""
        return [kernel for kernel in self.kernels if platform in kernel.platforms]

    def kernel(self, name: str) -> Kernel:
        """Return a kernel by name."""
        return next(kernel for kernel in self.kernels if kernel.name == name)


def other_dtypes(what: str, *arrays: Any) -> str:
    """Return '' if all arrays are bf16 or all are fp32, else a sentence that says why a kernel needs that."""
    dtypes = [jnp.dtype(array.dtype) for array in arrays]
    if dtypes[0] in DTYPES and len({*dtypes}) == 1:
        return ""
    names = ", ".join(x.name for x in dtypes)
    return f"The kernels for {what} need all arrays in bfloat16 or all in float32, not {names}."


def documents(rows: int) -> jax.Array:
    """Make documents for a check, int32 [rows, ROWS].

    Rows of the first half have two documents and padding, rows of the second half one document.
    """
    segments = np.ones((2, ROWS), np.int32)
    segments[0, 100:350], segments[0, 350:] = 2, 0
    return jnp.repeat(jnp.asarray(segments), rows // 2, axis=0)
