"""What an operation is: a reference, kernels in order of preference, and the checks that each of them has to pass."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.tiles import PLATFORMS
from zaya_jax.config import ModelConfig

# The norm of the difference over the norm of the exact result, of outputs and gradients, the largest: a few
# roundings of a dtype whose own relative error is at most 6e-8, or 4e-3. TF32 products, 5e-4, pass as fp32.
TOLERANCE = {"float32": 1e-3, "bfloat16": 3e-2}
DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))  # that kernels do
ROWS = 384  # tokens of a check: several tiles of every kernel, the last of them ragged


@dataclasses.dataclass(frozen=True)
class Kernel:
    """An implementation of an operation that only some devices have.

    Attributes:
      name: unique among the kernels of its operation.
      run: takes the architecture (`pallas_kernels.tiles.tile`), then the arguments of the reference.
      supports: takes the same, looks at shapes, dtypes and static arguments (window, with or without segments) alone,
        and returns the reason why `run` cannot do them, a sentence; '' where it can.
      platforms: which have it.
    """

    name: str
    run: Callable[..., Any]
    supports: Callable[..., str]
    platforms: tuple[str, ...] = PLATFORMS


class Input(NamedTuple):
    """An array of a check: normal numbers of this shape, standard deviation and mean."""

    shape: tuple[int, ...]
    scale: float = 1.0
    mean: float = 0.0


class Check(NamedTuple):
    """One way to compare an implementation of an operation with its reference.

    Attributes:
      run: takes an implementation of the operation, then the arrays, and returns its outputs.
      inputs: of the arrays. They are rounded to the dtype that is checked before either side gets them.
      rows: the number of leading arrays that `run` also takes with each element of their first axis repeated. Outputs
        are then repeated likewise; without a gradient some may be sums over that axis, that many times as large.
      gradient: whether the gradient of each array is checked as well.
      tolerance: by dtype.
    """

    run: Callable[..., Any]
    inputs: tuple[Input, ...]
    rows: int
    gradient: bool = True
    tolerance: Mapping[str, float] = TOLERANCE


@dataclasses.dataclass(frozen=True)
class Operation:
    """An operation of the model or the optimizer.

    Attributes:
      name: as `registry.OPERATIONS` has it; of what the model calls that of the field of `Ops`.
      reference: plain JAX for any device and dtype, which says what is right.
      checks: from a model, whose widths its arrays have, and whether it is trained, or only run forward, to checks by
        name; none where the operation is not used.
      kernels: in order of preference.
      uses: other operations that the reference takes as keyword arguments of their names.
    """

    name: str
    reference: Callable[..., Any]
    checks: Callable[[ModelConfig, bool], dict[str, Check]]
    kernels: tuple[Kernel, ...] = ()
    uses: tuple[str, ...] = ()

    def kernels_for(self, platform: str) -> list[Kernel]:
        """Those that the platform has, in order of preference."""
        return [kernel for kernel in self.kernels if platform in kernel.platforms]

    def kernel(self, name: str) -> Kernel:
        """The kernel of that name."""
        return next(kernel for kernel in self.kernels if kernel.name == name)


def other_dtypes(what: str, *arrays: jax.Array) -> str:
    """Why a kernel of `what` does not take the arrays together; '' where all are bf16, or all fp32."""
    dtypes = [jnp.dtype(array.dtype) for array in arrays]
    if dtypes[0] in DTYPES and len({*dtypes}) == 1:
        return ""
    return f"The kernels of {what} take all of bfloat16 or all of float32, not {', '.join(x.name for x in dtypes)}."


def documents(rows: int) -> jax.Array:
    """int32 [rows, ROWS]: two documents and padding in the first half of the rows; each other row is one document."""
    segments = np.ones((2, ROWS), np.int32)
    segments[0, 100:350], segments[0, 350:] = 2, 0
    return jnp.repeat(jnp.asarray(segments), rows // 2, axis=0)
