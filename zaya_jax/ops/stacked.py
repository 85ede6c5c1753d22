"""Stacks of all layers, of which a layer uses its part without a copy: parameters, sums of gradients, kept outputs."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


@jax.tree_util.register_dataclass
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
    kept: jax.Ref | None = None  # reference to space for the products of rows with `stack`, [l, t, q], see `kept_rows`

    @property
    def pair(self) -> tuple[jax.Array, jax.Array | int]:
        """The stack and the index, as kernels take them."""
        return self.stack, self.layer

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the layer's parameter."""
        return self.stack.shape[1:]

    @property
    def dtype(self) -> jnp.dtype:
        """The dtype of the parameter."""
        return self.stack.dtype

    def astype(self, dtype: jax.typing.DTypeLike) -> "StackedLayer":
        """Return the same; ValueError if `dtype` is another, since that would copy all layers."""
        if dtype != self.dtype:
            raise ValueError(f"A stack in {self.dtype} cannot be used in {jnp.dtype(dtype)} without a copy.")
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accumulated:
    """A stack of all layers' parameters with the sum of its gradients; it takes the place of the stack in a model."""

    stack: jax.Array  # [l, …], in the compute dtype
    total: jax.Ref  # reference to the fp32 sum of the gradients, [l, …]
    probe: jax.Array  # fp32 scalar that is differentiated in place of the stack; its gradient is zero
    # whether a layer gets a `StackedLayer` instead of a copy of its part
    in_place: bool = dataclasses.field(metadata={"static": True})
    kept: jax.Ref | None = None  # as in `StackedLayer`


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
    return StackedLayer(none, none, none, jnp.zeros((), jnp.float32))


def kept_rows(stack: jax.Array, rows: int) -> jax.Ref:
    """Make space for the products of `rows` with the matrices of all layers, [l, t, q], for the backward pass.

    Forward passes write it in place, once although layers are rematerialized. If autodiff kept the rows, the loop over
    layers would copy each layer's rows into the space and out again.
    """
    return jax.new_ref(jax.lax.empty((stack.shape[0], rows, stack.shape[-1]), stack.dtype), kind="no_grad_no_remat")
