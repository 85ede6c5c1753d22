"""Ring attention: keys and values travel around a ring, so that a device holds one shard at a time (arXiv 2310.01889).

Queries stay. At each hop a device attends to the shard of keys that it holds, and combines the result with the earlier
ones by log-sum-exp. The backward pass sends keys, values and their gradients around again. It stores the output and one
log-sum-exp per query, but neither scores nor other devices' keys.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from zaya_jax.config import ParallelConfig
from zaya_jax.ops.attention import PartialAttention, combine
from zaya_jax.ops.names import MATMUL_OUTPUT
from zaya_jax.parallel.context import device_pieces, refuse_cache
from zaya_jax.parallel.mesh import SEQUENCE_AXIS

Gradient = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def ring_attention(
    config: ParallelConfig, partial: Callable[..., PartialAttention], gradient: Gradient
) -> Callable[..., jax.Array]:
    """Make `Ops.attention` over a ring of the devices of the context axis; key segments are the device's own.

    Args:
      config: the layout.
      partial: `ops.attention.partial_attention`.
      gradient: `ops.attention.partial_attention_gradient`.
    """

    def attention(q_bshc: jax.Array, k_btkc: jax.Array, v_btkc: jax.Array, *, query_segments_bs: jax.Array,
                  key_segments_bt: jax.Array, query_offset: jax.Array | int = 0,
                  window: int | None = None) -> jax.Array:  # fmt: skip
        refuse_cache(query_offset)
        static = _Static(config, partial, gradient, window)
        return _ring(static, q_bshc, k_btkc, v_btkc, query_segments_bs, key_segments_bt)

    return attention


class _Static(NamedTuple):
    config: ParallelConfig
    partial: Callable[..., PartialAttention]
    gradient: Gradient
    window: int | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, q_seg: jax.Array, k_seg: jax.Array) -> jax.Array:
    return _forward(static, q, k, v, q_seg, k_seg).o_bshc.astype(q.dtype)


def _next(x: Any, devices: int) -> Any:
    return jax.lax.ppermute(x, SEQUENCE_AXIS, [(i, (i + 1) % devices) for i in range(devices)])


def _pairs(static: _Static, hop: jax.Array | int, length: int) -> list[list[jax.Array]]:
    """Return the query offset of each pair of a query piece and a key piece, for keys that travelled `hop` devices."""
    rank = jax.lax.axis_index(SEQUENCE_AXIS)
    query_pieces = device_pieces(static.config, rank)
    key_pieces = device_pieces(static.config, (rank - hop) % static.config.context)
    return [[(query - key) * length for key in key_pieces] for query in query_pieces]


def _split(arrays: Sequence[jax.Array], pieces: int) -> list[tuple[jax.Array, ...]]:
    """Split each array into the pieces of a sequence; returns one tuple of arrays for each piece."""
    return list(zip(*(jnp.split(x, pieces, axis=1) for x in arrays), strict=True))


def _attend(static: _Static, hop: jax.Array | int, q: jax.Array, k: jax.Array, v: jax.Array, q_seg: jax.Array,
            k_seg: jax.Array) -> PartialAttention:  # fmt: skip
    pieces = static.config.chunks // static.config.context
    offsets, keys = _pairs(static, hop, q.shape[1] // pieces), _split((k, v, k_seg), pieces)
    rows = []
    for row, (query, segments) in zip(offsets, _split((q, q_seg), pieces), strict=True):
        parts = [static.partial(query, key, value, segments, key_segments, offset, static.window)
                 for offset, (key, value, key_segments) in zip(row, keys, strict=True)]  # fmt: skip
        rows.append(functools.reduce(combine, parts))
    return PartialAttention(*(jnp.concatenate(x, 1) for x in zip(*rows, strict=True)))


def _forward(static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, q_seg: jax.Array,
             k_seg: jax.Array) -> PartialAttention:  # fmt: skip
    devices = static.config.context

    def hop(carry: tuple[PartialAttention, Any], index: jax.Array) -> tuple[tuple[PartialAttention, Any], None]:
        whole, travelling = carry
        k, v, k_seg = travelling = _next(travelling, devices)
        return (combine(whole, _attend(static, index, q, k, v, q_seg, k_seg)), travelling), None

    start = (_attend(static, 0, q, k, v, q_seg, k_seg), (k, v, k_seg))
    (whole, _), _ = jax.lax.scan(hop, start, jnp.arange(1, devices))
    return whole


def _forward_rule(static: _Static, q: jax.Array, k: jax.Array, v: jax.Array, q_seg: jax.Array,
                  k_seg: jax.Array) -> tuple[jax.Array, Any]:  # fmt: skip
    whole = _forward(static, q, k, v, q_seg, k_seg)
    o, lse = checkpoint_name(whole.o_bshc.astype(q.dtype), MATMUL_OUTPUT), checkpoint_name(whole.lse_bsh, MATMUL_OUTPUT)
    return o, (q, k, v, q_seg, k_seg, PartialAttention(o, lse))


def _gradients(static: _Static, hop: jax.Array | int, q: jax.Array, k: jax.Array, v: jax.Array, q_seg: jax.Array,
               k_seg: jax.Array, whole: PartialAttention, do: jax.Array) -> tuple[jax.Array, ...]:  # fmt: skip
    pieces = static.config.chunks // static.config.context
    offsets, keys = _pairs(static, hop, q.shape[1] // pieces), _split((k, v, k_seg), pieces)
    dq: list[Any] = []
    dk: list[Any] = [0.0] * pieces
    dv: list[Any] = [0.0] * pieces
    for row, (query, segments, o, lse, d_out) in zip(offsets, _split((q, q_seg, *whole, do), pieces), strict=True):
        total: Any = 0.0
        for index, (offset, (key, value, key_segments)) in enumerate(zip(row, keys, strict=True)):
            part = static.gradient(query, key, value, segments, key_segments, offset, static.window,
                                   PartialAttention(o, lse), d_out)  # fmt: skip
            total, dk[index], dv[index] = total + part[0], dk[index] + part[1], dv[index] + part[2]
        dq.append(total)
    return jnp.concatenate(dq, 1), jnp.concatenate(dk, 1), jnp.concatenate(dv, 1)


def _backward(static: _Static, saved: Any, do: jax.Array) -> tuple[Any, ...]:
    q, k, v, q_seg, k_seg, whole = saved
    devices = static.config.context

    def hop(carry: Any, index: jax.Array) -> tuple[Any, None]:
        dq, ring_state = carry
        k, v, k_seg, dk, dv = _next(ring_state, devices)
        hop_gradients = _gradients(static, index, q, k, v, q_seg, k_seg, whole, do)
        return (dq + hop_gradients[0], (k, v, k_seg, dk + hop_gradients[1], dv + hop_gradients[2])), None

    dq, dk, dv = _gradients(static, 0, q, k, v, q_seg, k_seg, whole, do)
    (dq, (*_, dk, dv)), _ = jax.lax.scan(hop, (dq, (k, v, k_seg, dk, dv)), jnp.arange(1, devices))
    dk, dv = _next((dk, dv), devices)  # the last hop returns gradients to their owner
    no_gradient = [np.zeros(x.shape, jax.dtypes.float0) for x in (q_seg, k_seg)]
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), *no_gradient


_ring.defvjp(_forward_rule, _backward)
