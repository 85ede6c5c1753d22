"""Decoding over devices: rows are split over the batch axes, and the slots of caches over `context`.

Every device has all parameters. Each full-attention layer's keys and values are split by slot: device i of the context
axis holds the i-th of equal contiguous parts. Everything else that a row carries, such as the ring of a layer with a
window, the tail of the convolutions and the logits, is the same on all devices of the context axis.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from zaya_jax.config import ModelConfig
from zaya_jax.config.model import LayerKind
from zaya_jax.model.attention import KeyValues
from zaya_jax.model.zaya import Cache, init_cache
from zaya_jax.ops.attention import AttentionInputs, PartialAttention
from zaya_jax.ops.cached_attention import KeysAndValues, by_row, new_slots, with_heads, write_heads
from zaya_jax.parallel.context import tree_attention
from zaya_jax.parallel.mesh import BATCH_AXES, SEQUENCE_AXIS, AnyMesh

CachedAttention = Callable[..., tuple[jax.Array, KeysAndValues]]
REPLICATED = PartitionSpec()
ROWS = PartitionSpec(BATCH_AXES)
STEP_ROWS = PartitionSpec(None, BATCH_AXES)  # of arrays [steps, rows, …]
_SLOTS = PartitionSpec(BATCH_AXES, SEQUENCE_AXIS)  # of keys and values [rows, slots, …]


def cache_specs(config: ModelConfig, cache: Cache) -> Cache:
    """Return the partition of every array of a cache."""

    def spec(layer: LayerKind, x: Any) -> Any:
        slots: Any = _SLOTS if layer.window is None else ROWS
        return KeyValues(slots, slots) if isinstance(x, KeyValues) else ROWS

    return dataclasses.replace(cache, layers=_map_layers(config, cache, spec), segments_bt=ROWS, length_b=ROWS)


def empty_cache(config: ModelConfig, rows: int, capacity: int, dtype: jax.typing.DTypeLike, mesh: AnyMesh) -> Cache:
    """Make `init_cache` on the devices of `mesh`, with slots for at least `capacity` tokens in equal parts."""

    def padded(layer: LayerKind, x: Any) -> Any:
        if layer.window is not None or not isinstance(x, KeyValues):
            return x
        missing = -x.k_btx.shape[1] % mesh.shape[SEQUENCE_AXIS]
        return jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, missing), (0, 0))), x)

    cache = init_cache(config, rows, capacity, dtype)
    if mesh.size == 1:
        return cache
    cache = dataclasses.replace(cache, layers=_map_layers(config, cache, padded))
    return jax.lax.with_sharding_constraint(cache, _shardings(mesh, cache_specs(config, cache)))


def _map_layers(config: ModelConfig, cache: Cache, function: Callable[[LayerKind, Any], Any]) -> tuple[Any, ...]:
    """Map the `KeyValues` of each layer, and every other array of its decode state."""

    def state(layer: LayerKind, tree: Any) -> Any:
        return jax.tree.map(functools.partial(function, layer), tree, is_leaf=lambda x: isinstance(x, KeyValues))

    return tuple(map(state, config.layer_kinds * config.num_groups, cache.layers))


def _shardings(mesh: AnyMesh, specs: Any) -> Any:
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def place(mesh: AnyMesh, tree: Any, specs: Any) -> Any:
    """Put arrays on the devices of `mesh`; on one device, leave them where they are."""
    return tree if mesh.size == 1 else jax.device_put(tree, _shardings(mesh, specs))


def on_shards(mesh: AnyMesh, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """Make `function` run on each device's part of its arguments; on one device, return it as it is."""
    if mesh.size == 1:
        return function
    # check_vma rejects kernels, whose outputs have no varying axes.
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def tree_cached_attention(partial: Callable[..., PartialAttention], local: CachedAttention) -> CachedAttention:
    """Make `Ops.cached_attention` for caches whose slots are split over `context`.

    New keys and values are written by the device that holds their slot. Attention is `context.tree_attention` with
    `partial`, with three collectives. A layer with a window has its whole ring on every device, and no collective: it
    uses `local`, that of one device.
    """

    def cached_attention(
        attention: Callable[..., jax.Array], x: AttentionInputs, cache: KeysAndValues
    ) -> tuple[jax.Array, KeysAndValues]:
        if x.window is not None:
            return local(attention, x, cache)
        slots, seen_bt = cache[0].shape[1], x.key_segments_bt
        first = jax.lax.axis_index(SEQUENCE_AXIS) * slots
        cache = write_heads(cache, x, new_slots(x.query_segments_bs, x.query_offset) - first)
        missing = slots * jax.lax.axis_size(SEQUENCE_AXIS) - seen_bt.shape[1]
        own_bt = jax.lax.dynamic_slice_in_dim(jnp.pad(seen_bt, ((0, 0), (0, missing))), first, slots, 1)
        own = dataclasses.replace(with_heads(x, cache, own_bt), query_offset=x.query_offset - first)
        return tree_attention(functools.partial(by_row, partial), own), cache

    return cached_attention
