"""Context parallelism: each sequence is split over several devices (docs/reference.md §4).

A device holds one piece of every sequence. With the zig-zag layout it holds two, the i-th from the front and the i-th
from the back, so that all devices see the same number of keys. Convolutions and the delayed value need the last rows
before a piece (its halo); attention needs the keys and values of all earlier pieces.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.config import ParallelConfig
from zaya_jax.ops.attention import AttentionInputs, PartialAttention
from zaya_jax.ops.cca_mix import ALL_PARTS, Halo, MixInputs, MixParts
from zaya_jax.parallel.mesh import SEQUENCE_AXIS


def sequence_order(config: ParallelConfig, length: int) -> np.ndarray | None:
    """Return the token index at each place of a sequence, in the order of the devices; None if it is not permuted."""
    if config.pieces == 1:
        return None
    chunks = np.arange(length).reshape(config.chunks, -1)
    return chunks[[piece for device in range(config.context) for piece in device_pieces(config, device)]].reshape(-1)


def device_pieces(config: ParallelConfig, device: Any) -> tuple[Any, ...]:
    """Return the indices of the pieces of a sequence that a device holds; `device` may be traced."""
    return (device,) if config.pieces == 1 else (device, config.chunks - 1 - device)


def fold(x: jax.Array, pieces: int) -> jax.Array:
    """Reshape [b, s, …] to [b · pieces, s / pieces, …]: each piece becomes a row."""
    return x.reshape(x.shape[0] * pieces, x.shape[1] // pieces, *x.shape[2:])


def unfold(x: jax.Array, pieces: int) -> jax.Array:
    """Undo `fold`."""
    return x.reshape(x.shape[0] // pieces, x.shape[1] * pieces, *x.shape[2:])


def make_halo(config: ParallelConfig) -> Callable[[jax.Array, jax.Array, jax.Array, int], Halo]:
    """Make `Ops.halo`, which fetches the rows before each piece from the devices that hold them.

    It uses two `ppermute`s in each direction: one for floating-point rows, one for their documents.
    """
    last, pieces = config.context - 1, config.pieces
    forward, backward = [(i, i + 1) for i in range(last)], [(i + 1, i) for i in range(last)]

    def before(tail: jax.Array) -> jax.Array:
        """Map the last rows of each piece [b · pieces, rows, …] to the rows before each piece."""
        if pieces == 1:
            return jax.lax.ppermute(tail, SEQUENCE_AXIS, forward)
        front, back = jnp.moveaxis(tail.reshape(-1, 2, *tail.shape[1:]), 1, 0)
        # A front piece is followed by the next device's front piece, on the last device by its own back piece. A back
        # piece is followed by the previous device's back piece.
        over = jax.lax.ppermute(back, SEQUENCE_AXIS, backward)
        over = jnp.where(jax.lax.axis_index(SEQUENCE_AXIS) == last, front, over)
        return jnp.stack([jax.lax.ppermute(front, SEQUENCE_AXIS, forward), over], 1).reshape(tail.shape)

    def halo(u_bsnc: jax.Array, delayed_bsx: jax.Array, segments_bs: jax.Array, rows: int) -> Halo:
        u, delayed, segments = (fold(x, pieces) for x in (u_bsnc, delayed_bsx, segments_bs))
        count, least = u.shape[0], max(rows, 1)
        flat = [u[:, u.shape[1] - rows :].reshape(count, -1), delayed[:, -1:].reshape(count, -1)]
        flat = before(jnp.concatenate(flat, 1))
        u_size = rows * u.shape[2] * u.shape[3]
        u_bwnc, first = flat[:, :u_size].reshape(count, rows, *u.shape[2:]), segments.shape[1] - least
        return Halo(u_bwnc, before(segments[:, first:]), flat[:, u_size:].reshape(count, 1, -1))

    return halo


def make_mix(config: ParallelConfig, local: Callable[..., Any]) -> Callable[..., Any]:
    """Make `Ops.cca_mix` for the pieces that a device holds, with their halos."""
    pieces = config.pieces

    def mix(x: MixInputs, parts: MixParts = ALL_PARTS) -> Any:
        packed, segments, cos, sin = (fold(array, pieces) for array in (x.packed_bsy, x.segments_bs, *x.rotary))
        out = local(x._replace(packed_bsy=packed, segments_bs=segments, rotary=(cos, sin)), parts)
        return tuple(unfold(array, pieces) for array in out)

    return mix


def gather_sequence(config: ParallelConfig, x_bs: jax.Array) -> jax.Array:
    """Gather all pieces of a sequence in order: [b, s, …] on each device to [b, whole, …]."""
    x = jax.lax.all_gather(x_bs, SEQUENCE_AXIS, axis=1, tiled=True)
    if config.pieces == 1:
        return x
    b, tokens = x.shape[:2]
    pieces = x.reshape(b, config.context, 2, tokens // config.chunks, *x.shape[2:])
    ordered = jnp.concatenate([pieces[:, :, 0], pieces[:, ::-1, 1]], 1)
    return ordered.reshape(b, tokens, *x.shape[2:])


def gathered_attention(config: ParallelConfig, local: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make `Ops.attention` in which every device gathers all keys and values: one collective, but the most memory.

    The key segments are those of the whole sequence (`Ops.key_segments`); `local` is attention on one device. The
    gradient of the gather is a reduce-scatter.
    """

    def attention(*qkv: Any, **options: Any) -> jax.Array:
        x = AttentionInputs(*qkv, **options)
        refuse_cache(x.query_offset)
        keys_values = gather_sequence(config, jnp.concatenate([x.k_btkc, x.v_btkc], -1))
        k, v = jnp.split(keys_values, 2, axis=-1)
        pieces = device_pieces(config, jax.lax.axis_index(SEQUENCE_AXIS))
        length, out = x.q_bshc.shape[1] // len(pieces), []
        for i, piece in enumerate(pieces):
            own = slice(i * length, (i + 1) * length)
            q, segments = x.q_bshc[:, own], x.query_segments_bs[:, own]
            part = AttentionInputs(q, k, v, segments, x.key_segments_bt, piece * length, x.window)
            out.append(part.call(local))
        return jnp.concatenate(out, 1)

    return attention


def refuse_cache(query_offset: Any) -> None:
    """Raise `ValueError` if the queries follow cached tokens."""
    if not isinstance(query_offset, int) or query_offset:
        raise ValueError("Context parallelism does not support a cache: decode with parallel.context.tree_attention.")


def tree_attention(partial: Callable[..., PartialAttention], x: AttentionInputs) -> jax.Array:
    """Tree attention: replicated queries attend to keys that are split over devices (arXiv 2408.04093).

    Each device attends to its own keys, with `ops.attention.partial_attention`. The results are combined with one
    maximum and two sums over devices, whose size does not depend on the number of keys (docs/reference.md §4.5).

    `x` has queries, the same on all devices; this device's keys and values, where empty places have segment 0; and the
    index of the first query relative to this device's first key, which may be negative or past the last key. Returns
    [b, s, h, c] in the dtype of the queries, the same on all devices.
    """
    o, lse = partial(x)
    axis = SEQUENCE_AXIS
    weight = jnp.exp(lse - jax.lax.pmax(lse, axis))
    total = jax.lax.psum(weight, axis)
    return (jax.lax.psum(o * weight[..., None], axis) / total[..., None]).astype(x.q_bshc.dtype)
