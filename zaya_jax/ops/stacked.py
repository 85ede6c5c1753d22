"""Stacks of all layers' parameters with the sums of their gradients, and a layer's part of one without a copy."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax


@functools.partial(jax.tree_util.register_dataclass, data_fields=["stack", "layer", "total", "probe"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class StackedLayer:
    """A parameter of one layer, where it is in memory.

    An operation's backward pass adds the parameter's gradient to `total` in place, and gives `probe` a gradient of
    zero. jax differentiates `probe` in place of the stack: a gradient of the stack would be as large as all layers.
    """

    stack: jax.Array  # [l, …], all layers
    layer: jax.Array | int  # int32 index of the layer
    # reference to the fp32 sum of the gradients of `stack`; None if there is no gradient, or if the stack has one
    # layer, whose gradient is returned as usual
    total: jax.Ref | None = None
    probe: jax.Array | None = None  # fp32 scalar; None without `total`

    @property
    def pair(self) -> tuple[jax.Array, jax.Array | int]:
        """The stack and the index, as kernels take them."""
        return self.stack, self.layer

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the layer's parameter."""
        return self.stack.shape[1:]

    @property
    def dtype(self) -> jax.numpy.dtype:
        """The dtype of the parameter."""
        return self.stack.dtype

    def astype(self, dtype: jax.typing.DTypeLike) -> "StackedLayer":
        """Return the same; ValueError if `dtype` is another, since that would copy all layers."""
        if dtype != self.dtype:
            raise ValueError(f"A stack in {self.dtype} cannot be used in {jax.numpy.dtype(dtype)} without a copy.")
        return self


@functools.partial(jax.tree_util.register_dataclass, data_fields=["stack", "total", "probe"], meta_fields=["in_place"])
@dataclasses.dataclass(frozen=True)
class Accumulated:
    """A stack of all layers' parameters with the sum of its gradients; it takes the place of the stack in a model."""

    stack: jax.Array  # [l, …], in the compute dtype
    total: jax.Ref  # reference to the fp32 sum of the gradients, [l, …]
    probe: jax.Array  # fp32 scalar that is differentiated in place of the stack; its gradient is zero
    in_place: bool  # whether a layer gets a `StackedLayer` instead of a copy of its part


Matrices = jax.Array | StackedLayer


def in_stack(x: Matrices) -> StackedLayer:
    """Return a parameter as a stack of one layer, unless it is in a stack already."""
    return x if isinstance(x, StackedLayer) else StackedLayer(x[None], 0)


def matrix_gradient(outer: Callable[..., jax.Array], matrices: Matrices) -> Any:
    """Return the gradient of the matrices of one layer, or add it to their total.

    `outer` computes the gradient as [1, …], or, given the arguments `total_lepq` and `layer`, adds it to the total.
    """
    if not isinstance(matrices, StackedLayer):
        return outer()[0].astype(matrices.dtype)
    total: Any = matrices.total
    total[...] = outer(total_lepq=total[...], layer=matrices.layer)
    none: Any = None  # a gradient of zero
    return StackedLayer(none, none, none, jax.numpy.zeros((), jax.numpy.float32))
