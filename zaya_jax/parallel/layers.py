"""FSDP inside the loop over layers: gather the parameters of a layer, and merge its adapters."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from zaya_jax.model.lora import Adapted, adapter_names, merge
from zaya_jax.model.tree import map_variables, name_in_layer
from zaya_jax.parallel.collectives import sum_scatter
from zaya_jax.parallel.rules import LeafPlacement


def gather_layer(leaves: Mapping[str, LeafPlacement], dtypes: Mapping[str, Any]) -> Callable[[Any], Any]:
    """Make `Ops.gather_layer`, which turns a layer's shards into the whole layer in its compute dtype.

    Matrices with adapters are merged with them, so that the sum and its gradient exist for one layer at a time. The
    gradient of a gathered matrix is reduce-scattered in the dtype of the shard, since the compute dtype would lose
    bits.

    Args:
      leaves: placement of all parameters, by name; it is the same at every position of the layer pattern.
      dtypes: compute dtype of each parameter, by name.
    """
    by_layer = {
        name_in_layer(name): (place.axis, dtypes[name])
        for name, place in leaves.items()
        if place.by_layer and place.axis is not None
    }

    def whole(name: str, x: jax.Array) -> jax.Array:
        if name not in by_layer:
            return x
        axis, dtype = by_layer[name]
        return _gather(x, x.ndim + axis, dtype)

    def gather(name: str, x: jax.Array | Adapted) -> jax.Array:
        if not isinstance(x, Adapted):
            return whole(name, x)
        a, b = adapter_names(name)
        return merge(Adapted(whole(name, x.base), whole(a, x.a), whole(b, x.b), x.scale))

    return lambda block: map_variables(block, gather)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, axis: int, dtype: Any) -> jax.Array:
    return jax.lax.all_gather(x.astype(dtype), "fsdp", axis=axis, tiled=True)


def _gather_forward(x: jax.Array, axis: int, dtype: Any) -> tuple[jax.Array, jax.Array]:
    return _gather(x, axis, dtype), x[..., :0]


def _gather_backward(axis: int, dtype: Any, like: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    del dtype
    return (sum_scatter(g.astype(like.dtype), "fsdp", axis),)


_gather.defvjp(_gather_forward, _gather_backward)
