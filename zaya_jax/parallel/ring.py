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
from jax.ad_checkpoint import checkpoint_name

from zaya_jax.config import ParallelConfig
from zaya_jax.ops.attention import AttentionInputs, PartialAttention, combine
from zaya_jax.ops.names import MATMUL_OUTPUT
from zaya_jax.parallel.context import device_pieces, refuse_cache
from zaya_jax.parallel.mesh import SEQUENCE_AXIS


class Ring(NamedTuple):
    """Static arguments of ring attention."""

    config: ParallelConfig  # the layout
    partial: Callable[..., PartialAttention]  # `ops.attention.partial_attention`
    gradient: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]  # `ops.attention.partial_attention_gradient`

    def next(self, x: Any) -> Any:
        """Send arrays to the next device of the ring."""
        devices = self.config.context
        return jax.lax.ppermute(x, SEQUENCE_AXIS, [(i, (i + 1) % devices) for i in range(devices)])


def ring_attention(ring: Ring) -> Callable[..., jax.Array]:
    """Make `Ops.attention` over a ring of the devices of the context axis; key segments are the device's own."""

    def attention(*qkv: Any, **options: Any) -> jax.Array:
        x = AttentionInputs(*qkv, **options)
        refuse_cache(x.query_offset)
        return _ring(ring, x)

    return attention


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring(ring: Ring, x: AttentionInputs) -> jax.Array:
    return _forward(ring, x).o_bshc.astype(x.q_bshc.dtype)


def _keys(x: AttentionInputs) -> tuple[Any, ...]:
    return x.k_btkc, x.v_btkc, x.key_segments_bt


def _pairs(
    ring: Ring, hop: jax.Array | int, x: AttentionInputs, keys: Sequence[Any], *of_queries: jax.Array
) -> list[tuple[tuple[jax.Array, ...], list[AttentionInputs]]]:
    """Pair each query piece with each key piece, for keys that travelled `hop` devices.

    Returns for each query piece its part of `of_queries`, and the inputs of attention to each key piece.
    """
    rank, length = jax.lax.axis_index(SEQUENCE_AXIS), x.q_bshc.shape[1] // ring.config.pieces
    query_pieces = device_pieces(ring.config, rank)
    key_pieces = device_pieces(ring.config, (rank - hop) % ring.config.context)
    offsets = [[(query - key) * length for key in key_pieces] for query in query_pieces]
    parts, rows = _split(keys, ring.config.pieces), []
    for row, (q, segments, *others) in zip(
        offsets, _split((x.q_bshc, x.query_segments_bs, *of_queries), ring.config.pieces), strict=True
    ):
        pairs = zip(row, parts, strict=True)
        inputs = [AttentionInputs(q, k, v, segments, theirs, offset, x.window) for offset, (k, v, theirs) in pairs]
        rows.append((tuple(others), inputs))
    return rows


def _split(arrays: Sequence[Any], pieces: int) -> list[tuple[jax.Array, ...]]:
    """Split each array into the pieces of a sequence; returns one tuple of arrays for each piece."""
    return list(zip(*(jnp.split(x, pieces, axis=1) for x in arrays), strict=True))


def _attend(ring: Ring, hop: jax.Array | int, x: AttentionInputs, keys: Sequence[Any]) -> PartialAttention:
    rows = [functools.reduce(combine, map(ring.partial, inputs)) for _, inputs in _pairs(ring, hop, x, keys)]
    return PartialAttention(*(jnp.concatenate(parts, 1) for parts in zip(*rows, strict=True)))


def _forward(ring: Ring, x: AttentionInputs) -> PartialAttention:
    def hop(carry: tuple[PartialAttention, Any], index: jax.Array) -> tuple[tuple[PartialAttention, Any], None]:
        attended, keys = carry
        keys = ring.next(keys)
        return (combine(attended, _attend(ring, index, x, keys)), keys), None

    start = (_attend(ring, 0, x, _keys(x)), _keys(x))
    (attended, _), _ = jax.lax.scan(hop, start, jnp.arange(1, ring.config.context))
    return attended


def _forward_rule(ring: Ring, x: AttentionInputs) -> tuple[jax.Array, Any]:
    attended = _forward(ring, x)
    o = checkpoint_name(attended.o_bshc.astype(x.q_bshc.dtype), MATMUL_OUTPUT)
    lse = checkpoint_name(attended.lse_bsh, MATMUL_OUTPUT)
    return o, (x, PartialAttention(o, lse))


def _gradients(
    ring: Ring, hop: jax.Array | int, x: AttentionInputs, keys: Sequence[Any], attended: PartialAttention, do: jax.Array
) -> tuple[jax.Array, ...]:
    dq: list[Any] = []
    dk: list[Any] = [0.0] * ring.config.pieces
    dv: list[Any] = [0.0] * ring.config.pieces
    for (o, lse, d_out), inputs in _pairs(ring, hop, x, keys, *attended, do):
        total: Any = 0.0
        for index, pair in enumerate(inputs):
            part = ring.gradient(pair, PartialAttention(o, lse), d_out)
            total, dk[index], dv[index] = total + part[0], dk[index] + part[1], dv[index] + part[2]
        dq.append(total)
    return jnp.concatenate(dq, 1), jnp.concatenate(dk, 1), jnp.concatenate(dv, 1)


def _backward(ring: Ring, saved: Any, do: jax.Array) -> tuple[AttentionInputs]:
    x, attended = saved

    def hop(carry: Any, index: jax.Array) -> tuple[Any, None]:
        dq, ring_state = carry
        *keys, dk, dv = ring.next(ring_state)
        more_q, more_k, more_v = _gradients(ring, index, x, keys, attended, do)
        return (dq + more_q, (*keys, dk + more_k, dv + more_v)), None

    dq, dk, dv = _gradients(ring, 0, x, _keys(x), attended, do)
    (dq, (*_, dk, dv)), _ = jax.lax.scan(hop, (dq, (*_keys(x), dk, dv)), jnp.arange(1, ring.config.context))
    dk, dv = ring.next((dk, dv))  # the last hop returns gradients to their owner
    gradients = (gradient.astype(x.q_bshc.dtype) for gradient in (dq, dk, dv))
    return (AttentionInputs(*gradients, query_offset=None, window=x.window),)  # None means zero


_ring.defvjp(_forward_rule, _backward)
