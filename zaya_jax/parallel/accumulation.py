"""Sums of the layers' gradients over micro-batches, which each layer's backward pass adds to in place.

Autodiff of a scan stacks the gradients of all layers, and a loop over micro-batches adds the stacks: three arrays as
large as the model, read and written for every micro-batch. Here the sums are references (`jax.new_ref`), to which each
layer adds its gradient as soon as it has one. Small parameters are left to autodiff, since each would add a launch.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.job.jax_internals import leave_stacks_unfilled
from zaya_jax.ops.stacked import Accumulated, StackedLayer


def scan_layers(step: Callable[..., Any], carry: Any, layers: Any) -> tuple[Any, Any]:
    """`jax.lax.scan` over the leading axis of `layers`, whose leaves may be `Accumulated`: makes `Ops.scan_layers`."""
    leave_stacks_unfilled()
    leaves, tree = jax.tree.flatten(layers, is_leaf=lambda x: isinstance(x, Accumulated))
    length = jax.tree.leaves(layers)[0].shape[0]

    def scanned(x: jax.Array | Accumulated) -> jax.Array | None:
        if isinstance(x, Accumulated):
            return None if x.in_place else x.stack
        return x

    def indexed_step(carry: Any, scanned: tuple[jax.Array, list[jax.Array | None]]) -> tuple[Any, Any]:
        index, parts = scanned
        return step(carry, tree.unflatten([_layer(x, part, index) for x, part in zip(leaves, parts, strict=True)]))

    return jax.lax.scan(indexed_step, carry, (jnp.arange(length), [scanned(x) for x in leaves]))


def _layer(x: jax.Array | Accumulated, part: jax.Array | None, index: jax.Array) -> Any:
    if not isinstance(x, Accumulated):
        return part
    if part is None:
        return StackedLayer(x.stack, index, x.total, x.probe, x.kept)
    return _add_gradient(part, index, x.total, x.probe)


@jax.custom_vjp
def _add_gradient(part: jax.Array, index: jax.Array, total: jax.Ref, probe: jax.Array) -> jax.Array:
    """Return `part`; its gradient is added to `total[index]`."""
    del index, total, probe
    return part


def _forward(part: jax.Array, index: jax.Array, total: jax.Ref, probe: jax.Array) -> tuple[jax.Array, Any]:
    del probe
    return part, (index, total)


def _backward(saved: tuple[jax.Array, jax.Ref], gradient: jax.Array) -> tuple[Any, ...]:
    index, total = saved
    total[index] += gradient.astype(total.dtype)
    return None, None, None, jnp.zeros((), jnp.float32)


_add_gradient.defvjp(_forward, _backward)
