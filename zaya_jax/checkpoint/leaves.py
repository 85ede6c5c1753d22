"""A training state as flat arrays by name, the form in which it is saved."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def named(state: Any) -> dict[str, Any]:
    """Return the leaves of a pytree by dotted name, such as 'params.blocks.0.attention.query'.

    Empty arrays are left out; PRNG keys become their data (uint32 [2]). Leaves can be abstract.
    """
    return {name: _plain(leaf) for name, leaf in _leaves(state) if leaf.size}


def like(abstract: Any, arrays: Mapping[str, jax.Array]) -> Any:
    """Build the pytree that `abstract` describes from `arrays`; the inverse of `named`."""
    treedef = jax.tree.structure(abstract)
    return jax.tree.unflatten(treedef, [_restored(leaf, arrays.get(name)) for name, leaf in _leaves(abstract)])


def _leaves(tree: Any) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf)
            for path, leaf in jax.tree.leaves_with_path(tree)]  # fmt: skip


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _plain(leaf: Any) -> Any:
    if not _is_key(leaf):
        return leaf
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, leaf)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def _restored(leaf: Any, array: jax.Array | None) -> Any:
    if array is None:
        return jax.device_put(jnp.zeros(leaf.shape, leaf.dtype), leaf.sharding)
    return jax.random.wrap_key_data(array) if _is_key(leaf) else array
