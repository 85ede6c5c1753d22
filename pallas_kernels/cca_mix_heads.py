"""The gradient of the CCA mix for one head, the part that both kinds of programs of its kernel share.

Registers can be neither sliced nor shifted. A range of channels is therefore a masked sum over all ranges, and rows are
shifted by matmuls with 0 and 1, which are exact.
"""

import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

from pallas_kernels.cca_mix import filled, rows_at, sizes_of, span, tap_row
from pallas_kernels.product import product


class Head(NamedTuple):
    """A head of queries or of keys."""

    number: jax.Array  # index among all heads, queries before keys
    among: jax.Array  # index among the heads of its kind
    gradient: Any  # reference to the gradient of its kind
    first: jax.Array  # first of the heads that it is averaged with: a query's key head, or a key's query heads
    others: int  # number of these heads
    scale: jax.Array | float  # factor after the norm


class Inputs(NamedTuple):
    """References to the inputs of the kernel."""

    x: Any
    q_bshc: Any
    k_bskc: Any
    v_bskc: Any

    def query(self, head: jax.Array) -> Head:
        """Return a query head."""
        heads, num_kv = self.q_bshc.shape[2], self.k_bskc.shape[2]
        return Head(head, head, self.q_bshc, heads + jax.lax.div(head, heads // num_kv), 1, 1.0)

    def key(self, group: jax.Array) -> Head:
        """Return a key head."""
        heads, num_kv = self.q_bshc.shape[2], self.k_bskc.shape[2]
        served, scale = heads // num_kv, self.x.temperature_k[group].astype(jnp.float32)
        return Head(heads + group, group, self.k_bskc, group * served, served, scale)


def head_gradient(x: Any, head: Head, batch: jax.Array, time: jax.Array, depth: int, *,
                  unroll: bool = False) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Compute the gradient of a head's convolution output, recomputing the forward pass.

    Args:
      x: references to the arrays of `MixArrays`.
      head: the head.
      batch: row of the batch.
      time: [tokens], indices of the tokens in the piece.
      depth: channels in a step of the matmul.
      unroll: whether to unroll these steps, so that a loop over times can load the convolution's weights beforehand.

    Returns:
      The gradient, [tokens, c] in the dtype of `packed_bsmc`, zero outside of the piece; and the dot product of the
      normed head and its gradient, fp32 [tokens], whose sum is the gradient of a key's temperature.
    """
    c = x.grouped_wncc.shape[2]

    def own(number: jax.Array) -> jax.Array:
        return rows_at(x, batch, time, number, span(0, c))

    mixed = _convolved(x, batch, time, head.number, depth, unroll)
    others = own(head.first)
    if head.others > 1:
        others = jax.lax.fori_loop(1, head.others, lambda i, total: total + own(head.first + i), others)
    mixed += 0.5 * (own(head.number) + others * (1 / head.others))
    g = _turned_back(x, head, batch, time)
    inverse = jax.lax.rsqrt(jnp.sum(mixed * mixed, axis=1) + 1e-12)
    along = jnp.sum(mixed * g, axis=1)
    gradient = (g - mixed * (along * inverse * inverse)[:, None]) * (inverse * (c**0.5 * head.scale))[:, None]
    return gradient.astype(x.packed_bsmc.dtype), along * inverse * c**0.5


def _convolved(x: Any, batch: jax.Array, time: jax.Array, head: jax.Array, depth: int, unroll: bool) -> jax.Array:
    """Compute both convolutions of a head, [tokens, c] fp32, rounded as in the forward pass."""
    dtype, c = x.packed_bsmc.dtype, x.grouped_wncc.shape[2]
    taps, chunks, out = x.grouped_wncc.shape[0], c // depth, span(0, c)

    def step(z: jax.Array, tap: jax.Array | int, chunk: jax.Array | int) -> jax.Array:
        channels = chunk * depth + span(0, depth)
        row = tap_row(x, batch, time, head, channels, taps - 1 - tap)
        return z + product(row, triton.load(x.grouped_wncc.at[tap, head, channels[:, None], out[None, :]]))

    z = jnp.zeros((time.size, c), jnp.float32)
    if unroll:
        for tap, chunk in itertools.product(range(taps), range(chunks)):
            z = step(z, tap, chunk)
    else:
        div, rem = jax.lax.div, jax.lax.rem
        z = jax.lax.fori_loop(0, taps * chunks, lambda i, z: step(z, div(i, chunks), rem(i, chunks)), z)
    bias = triton.load(x.grouped_bias_nc.at[head, out]).astype(dtype)
    return (z.astype(dtype) + bias[None, :]).astype(jnp.float32)


def channels_of(x: jax.Array, number: jax.Array, depth: int) -> jax.Array:
    """Return range `number` of `depth` channels of x [tokens, c]."""
    tokens, c = x.shape
    if depth == c:
        return x
    chosen = (span(0, c // depth) == number)[None, :, None]
    parts = x.reshape(tokens, c // depth, depth)
    return jnp.sum(jnp.where(chosen, parts, jnp.zeros_like(parts)), axis=1, dtype=jnp.float32).astype(x.dtype)


def _turned_back(x: Any, head: Head, batch: jax.Array, time: jax.Array) -> jax.Array:
    """Compute the gradient of a head before RoPE, [tokens, c] fp32, zero outside of the piece.

    The other channel of each pair is loaded separately, since registers cannot be permuted.
    """
    (_, s, _, _, c, *_), pairs = sizes_of(x), x.cos_bsp.shape[2]
    inside, channel = inside_of(time, s, c), span(0, c)
    first, second = channel < pairs, (channel >= pairs) & (channel < 2 * pairs)

    def load(source: Any, shift: int, among: jax.Array, *heads: jax.Array) -> jax.Array:
        at = source.at[(batch, time[:, None], *heads, channel[None, :] + shift)]
        return triton.load(at, mask=inside & among[None, :], other=0.0).astype(jnp.float32)

    def both(table: Any) -> jax.Array:
        return load(table, 0, first) + load(table, -pairs, second)

    g = load(head.gradient, 0, channel >= 0, head.among)
    other = load(head.gradient, pairs, first, head.among) - load(head.gradient, -pairs, second, head.among)
    return g * (both(x.cos_bsp) + jnp.where(channel >= 2 * pairs, 1.0, 0.0)[None, :]) + other * both(x.sin_bsp)


def inside_of(time: jax.Array, length: int, c: int) -> jax.Array:
    """Return the mask [tokens, c] of times inside an array of that length."""
    return filled(((time >= 0) & (time < length))[:, None], time.size, c)
