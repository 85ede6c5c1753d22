"""Which operations are done by kernels: those that the platform has, the model's shapes allow, and that are right."""

import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.tiles import PLATFORMS
from zaya_jax.config import ModelConfig
from zaya_jax.ops import Ops, ops_for
from zaya_jax.ops.selfcheck import Check, compare, operation_checks
from zaya_jax.ops.target import Target

# Each operation that has a kernel, with the self-checks that go through it.
OPERATIONS = {
    "residual_norm": ("residual_norm",),
    "cca_mix": ("cca_mix",),
    "attention": ("attention", "attention, window"),
    "grouped_matmul": ("grouped_matmul", "dispatch_experts"),
    "momentum": ("momentum",),
    "symmetric": ("orthogonalize",),
}


@dataclasses.dataclass(frozen=True)
class KernelSelection:
    """How the operations are done.

    Attributes:
      target: without what is left to the references.
      reasons: why each of those is, a sentence by operation.
    """

    target: Target
    reasons: dict[str, str] = dataclasses.field(default_factory=dict)

    def without(self, reasons: dict[str, str]) -> "KernelSelection":
        """The choice with more operations left to their references."""
        reasons = {**self.reasons, **reasons}
        left = tuple(name for name in OPERATIONS if name in reasons or name in self.target.without)
        return KernelSelection(dataclasses.replace(self.target, without=left), reasons)

    @property
    def kernels(self) -> list[str]:
        """The operations that are done by kernels."""
        return [name for name in OPERATIONS if self.target.kernel(name)]

    @property
    def ops(self) -> Ops:
        """The operations, by the selected implementations."""
        return ops_for(self.target)

    def __str__(self) -> str:
        """One line for a person."""
        if self.target.platform not in PLATFORMS:
            return f"There are no kernels for {self.target.platform}: all operations are XLA's."
        said = f"Kernels for {self.target.device_kind}: {', '.join(self.kernels) or 'none'}."
        return " ".join([said, *(f"Not {name}: {reason}" for name, reason in self.reasons.items())])


def choose(target: Target, model: ModelConfig, dtype: str) -> KernelSelection:
    """The kernels that take the shapes of `model` in `dtype` on `target`; nothing is compiled.

    Args:
      target: what is compiled for; what it is `without` already stays so.
      model: whose operations they are.
      dtype: 'float32' or 'bfloat16'; in 'float64' everything is left to the references.
    """
    if target.platform not in PLATFORMS:
        return KernelSelection(target)
    checks, reasons = operation_checks(model), {}
    for operation, names in OPERATIONS.items():
        if target.kernel(operation) is None:
            continue
        try:
            for name in names:
                _shapes(checks[name], target, dtype)
        except ValueError as error:
            reasons[operation] = str(error)
    return KernelSelection(target).without(reasons)


def _shapes(check: Check, target: Target, dtype: str) -> Any:
    arrays = [jax.ShapeDtypeStruct(array.shape, jnp.dtype(dtype)) for array in check.arrays]
    with jax.enable_x64(dtype == "float64"):
        return jax.eval_shape(functools.partial(check.run, target), *arrays)


def validate_kernels(choice: KernelSelection, model: ModelConfig, dtype: str) -> KernelSelection:
    """Try each chosen kernel, forward and backward, on this process's first device against double precision.

    A kernel that does not compile, does not run or gives other numbers is left out, with a `UserWarning`.
    """
    if not choice.kernels:
        return choice
    checks, reasons = operation_checks(model), {}
    for operation, names in OPERATIONS.items():
        if operation not in choice.kernels:
            continue
        if problem := next(filter(None, (_problem(checks[name], choice.target, dtype) for name in names)), ""):
            reasons[operation] = problem
            warnings.warn(f"The kernel of {operation} is not used on this {choice.target.device_kind}: {problem}",
                          stacklevel=2)  # fmt: skip
    return choice.without(reasons)


def _problem(check: Check, target: Target, dtype: str) -> str:
    try:
        error = compare(check, [dtype], target)[dtype]
    except Exception as problem:  # the compiler's, the driver's: whatever it is, the reference remains
        return f"it fails with {type(problem).__name__}: {' '.join(str(problem).split())[:300]}"
    allowed = check.tolerance[dtype]
    return "" if error <= allowed else f"it is {error:.2g} off, but may be {allowed:g}."
