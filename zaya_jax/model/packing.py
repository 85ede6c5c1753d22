"""Stack the small parameters of a layer, so that the loop over layers slices few arrays.

On a GPU, the loop launches a kernel to slice each parameter of a layer out of its stack, and another to write its
gradient. A layer has two dozen parameters of at most a few hundred KB, whose launches take longer than their bytes.
Those of the same shape and dtype therefore become one array.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.ops.stacked import Accumulated

SMALL = 2**17  # elements of a layer's parameter up to which it is packed, and autodiff sums its gradients


def pack_small(blocks: Any) -> tuple[list[Any], Callable[[list[Any]], Any]]:
    """Pack the small arrays of a pytree of arrays [l, …] and `Accumulated` stacks, which are left as they are.

    Returns arrays [l, …] and [l, k, …], and a function from a layer of these, without the axis l, to one of `blocks`.
    """
    leaves, tree = jax.tree.flatten(blocks, is_leaf=lambda x: isinstance(x, Accumulated))
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, Accumulated) or math.prod(leaf.shape[1:]) > SMALL:
            alike[(index,)] = [index]
        else:
            alike.setdefault((leaf.shape, leaf.dtype), []).append(index)
    groups = list(alike.values())

    def unpack(packed: list[Any]) -> Any:
        parts: list[Any] = [None] * len(leaves)
        for group, x in zip(groups, packed, strict=True):
            for index, part in zip(group, (x,) if len(group) == 1 else _unstack(x), strict=True):
                parts[index] = part
        return tree.unflatten(parts)

    members = ([leaves[index] for index in group] for group in groups)
    return [jnp.stack(arrays, 1) if len(arrays) > 1 else arrays[0] for arrays in members], unpack


@jax.custom_vjp
def _unstack(x: jax.Array) -> tuple[jax.Array, ...]:
    """Return the parts of `x` along its first axis; its gradient is one stack, instead of a sum of padded arrays."""
    return tuple(jax.lax.index_in_dim(x, index, 0, keepdims=False) for index in range(x.shape[0]))


_unstack.defvjp(lambda x: (_unstack(x), None), lambda _, parts: (jnp.stack(parts),))
