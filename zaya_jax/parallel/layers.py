"""Collectives inside the loop over layers, where the layers hide them: gathers of FSDP, and reductions of gradients."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from zaya_jax.model.lora import Adapted, adapter_names, merge
from zaya_jax.model.tree import is_stacked, map_variables, name_in_layer
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.parallel.collectives import sum_scatter
from zaya_jax.parallel.rules import LeafPlacement


class Scattered(NamedTuple):
    """A parameter whose gradient is reduce-scattered in the backward pass of its layer, as the gradient of `shard`."""

    # Compute copy of the parameter, whole or this device's shard, which is gathered here; it gets no gradient.
    value: jax.Array
    # Gradient of earlier micro-batches on this device, which is added before the sum; None if there is none.
    total: jax.Array | None
    shard: jax.Array  # zeros with the shape and dtype of the reduced gradient


def gather_layer(leaves: Mapping[str, LeafPlacement], dtypes: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Make `Ops.gather_layer`, which turns a layer's shards into the whole layer in its compute dtype.

    Matrices with adapters are merged with them, so that the sum and its gradient exist for one layer at a time. The
    gradient of a gathered matrix is reduce-scattered in the dtype of the shard, since the compute dtype would lose
    bits. Parameters may be `Scattered`. Placements are the same at every position of the layer pattern.
    """
    places = {name_in_layer(name): (leaf, dtypes[name]) for name, leaf in leaves.items() if is_stacked(name)}

    def gather_array(name: str, x: Any) -> jax.Array:
        if name not in places:
            return x
        place, dtype = places[name]
        if isinstance(x, Scattered):
            ((axis, over),) = place.gathers
            x = _scattered(axis, over, dtype, x)
        return x if place.layer_axis is None else _gather(x, x.ndim + place.layer_axis, dtype)

    def gather(name: str, x: jax.Array | Scattered | Adapted) -> jax.Array:
        if not isinstance(x, Adapted):
            return gather_array(name, x)
        a, b = adapter_names(name)
        return merge(Adapted(gather_array(name, x.base), gather_array(a, x.a), gather_array(b, x.b), x.scale))

    return lambda block: map_variables(block, gather)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _scattered(axis: int, over: tuple[str, ...], dtype: Any, x: Scattered) -> jax.Array:
    value = x.value
    if value.shape != x.shard.shape:
        return value
    return jax.lax.all_gather(value.astype(dtype), over, axis=value.ndim + axis, tiled=True).astype(value.dtype)


def _scattered_forward(axis: int, over: tuple[str, ...], dtype: Any, x: Scattered) -> tuple[jax.Array, Any]:
    return _scattered(axis, over, dtype, x), x.total


def _scattered_backward(axis: int, over: tuple[str, ...], _dtype: Any, total: Any, g: jax.Array) -> tuple[Any]:
    g = g.astype(accumulation_dtype(g.dtype))
    g = sum_scatter(g if total is None else total + g, over, g.ndim + axis)
    return (Scattered(None, None, g),)  # pyright: ignore[reportArgumentType]


_scattered.defvjp(_scattered_forward, _scattered_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, axis: int, dtype: Any) -> jax.Array:
    return jax.lax.all_gather(x.astype(dtype), "fsdp", axis=axis, tiled=True)


def _gather_forward(x: jax.Array, axis: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    return _gather(x, axis, dtype), x[..., :0]


def _gather_backward(axis: int, _dtype: Any, like: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    return (sum_scatter(g.astype(like.dtype), "fsdp", axis),)


_gather.defvjp(_gather_forward, _gather_backward)
