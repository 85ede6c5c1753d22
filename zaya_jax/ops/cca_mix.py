"""The mixing half of CCA: from packed projections to attention-ready queries, keys and values.

Both convolutions run along the sequence on the `n = h + k` heads of queries and keys, with no nonlinearity
between. Seen from a token, everything before the start of its document is u = 0, so the depthwise
intermediate there is its bias (zaya1.md §1.3); packing is exact.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from zaya_jax.ops.precision import accumulation_dtype


class MixWeights(NamedTuple):
    """Parameters of the mix.

    `depthwise_wnc` is [k0, n, c]: tap w acts on the token k0 − 1 − w back. `grouped_wncc` is [k1, n, c, c],
    taps likewise, channels in then out. Biases are [n, c]; `temperature_k` scales the keys.
    """

    depthwise_wnc: jax.Array
    depthwise_bias_nc: jax.Array
    grouped_wncc: jax.Array
    grouped_bias_nc: jax.Array
    temperature_k: jax.Array


class Halo(NamedTuple):
    """What stands before the first token of this piece of the sequence.

    `u_bwnc` holds the last k0 + k1 − 2 rows of the packed query and key projections, `delayed_b1x` the last
    row of the delayed value projection, `segments_bw` and their documents (0 where there is none).
    """

    u_bwnc: jax.Array
    segments_bw: jax.Array
    delayed_b1x: jax.Array


def cca_mix(
    u_bsnc: jax.Array,
    current_bsx: jax.Array,
    delayed_bsx: jax.Array,
    halo: Halo,
    segments_bs: jax.Array,
    rotary: tuple[jax.Array, jax.Array],
    weights: MixWeights,
    delayed_start_x: jax.Array | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Convolutions, QK-mean, QK-norm, temperature, partial rotary embedding and value shift.

    Args:
      u_bsnc: query heads, then key heads, before the convolutions.
      current_bsx: first half of the value channels (x = k·c / 2), of this token.
      delayed_bsx: second half, which the next token will use.
      halo: the rows before the first.
      segments_bs: int32 document of each token.
      rotary: cos and sin, [b, s, rotated channels / 2] each, fp32.
      weights: the parameters.
      delayed_start_x: what stands for the delayed value at the start of a document; zero where None.

    Returns:
      q [b, s, h, c], k and v [b, s, k, c] in the dtype of `u_bsnc`.
    """
    # Heads stand before the sequence from here on, as both the grouped convolution and attention want them.
    num_kv = weights.temperature_k.shape[0]
    num_query = u_bsnc.shape[2] - num_kv
    u_bnsc = u_bsnc.transpose(0, 2, 1, 3)
    q_mean, k_mean = _qk_mean(*jnp.split(u_bnsc, [num_query], axis=1))
    q, k = jnp.split(_convolve(u_bnsc, segments_bs, halo, weights), [num_query], axis=1)
    q = _unit(q.astype(q_mean.dtype) + q_mean)
    k = _unit(k.astype(k_mean.dtype) + k_mean)
    k = k * weights.temperature_k.astype(k.dtype)[:, None, None]
    q, k = (rotate(x, *rotary).astype(u_bsnc.dtype).transpose(0, 2, 1, 3) for x in (q, k))
    v = _shift_value(current_bsx, delayed_bsx, segments_bs, halo, delayed_start_x)
    return q, k, v.reshape(*v.shape[:2], num_kv, -1)


def _qk_mean(q_bhsc: jax.Array, k_bksc: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Half of each query with its key, and the mean of those a key head serves; fp32."""
    b, h, s, c = q_bhsc.shape
    num_kv = k_bksc.shape[1]
    q = q_bhsc.astype(accumulation_dtype(q_bhsc.dtype)).reshape(b, num_kv, h // num_kv, s, c)
    mean = 0.5 * (q + k_bksc.astype(q.dtype)[:, :, None])
    return mean.reshape(b, h, s, c), mean.mean(2)


def _convolve(u_bnsc: jax.Array, segments_bs: jax.Array, halo: Halo, weights: MixWeights) -> jax.Array:
    taps0, taps1 = weights.depthwise_wnc.shape[0], weights.grouped_wncc.shape[0]
    b, _, s, _ = u_bnsc.shape
    dtype, sums = u_bnsc.dtype, accumulation_dtype(u_bnsc.dtype)
    u = jnp.concatenate([halo.u_bwnc.astype(dtype).transpose(0, 2, 1, 3), u_bnsc], 2)
    rows_before = taps0 + taps1 - 2  # the halo's segments hold one row more where this is none
    segments = jnp.concatenate([halo.segments_bw, segments_bs], 1)[:, -(s + rows_before) :]
    bias_n1c = weights.depthwise_bias_nc.astype(sums)[:, None]
    length = s + taps1 - 1  # the intermediate is needed from taps1 − 1 rows before the first token on
    own = segments[:, taps0 - 1 :]
    y = bias_n1c
    for tap in range(taps0):
        same = segments[:, tap : tap + length] == own
        part = u[:, :, tap : tap + length].astype(sums) * weights.depthwise_wnc[tap].astype(sums)[:, None]
        y = y + jnp.where(same[:, None, :, None], part, 0.0)
    rows = []
    for tap in range(taps1):
        same = own[:, tap : tap + s] == segments_bs
        rows.append(jnp.where(same[:, None, :, None], y[:, :, tap : tap + s], bias_n1c).astype(dtype))
    # One product over taps and channels together: its inner dimension is taps1 · c instead of c. The kernel is
    # repeated along the batch, so that both sides have the same batch dimensions and nothing is transposed.
    kernel_nxc = jnp.concatenate(list(weights.grouped_wncc.astype(dtype)), axis=1)
    kernel_bnxc = jnp.broadcast_to(kernel_nxc, (b, *kernel_nxc.shape))
    z = jnp.einsum("bnsx,bnxc->bnsc", jnp.concatenate(rows, -1), kernel_bnxc)
    return z + weights.grouped_bias_nc.astype(dtype)[:, None]


def _unit(x: jax.Array) -> jax.Array:
    """Each head scaled to the norm √c; ε inside the root keeps a zero head, and its gradient, finite."""
    return x * (jax.lax.rsqrt((x * x).sum(-1, keepdims=True) + 1e-12) * x.shape[-1] ** 0.5)


def rotate(x_bnsc: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary embedding on the first 2·cos.shape[-1] channels of each head, halves paired (zaya1.md §1.3)."""
    half = cos.shape[-1]
    first, second, rest = jnp.split(x_bnsc, [half, 2 * half], axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], -1)


def _shift_value(current_bsx: jax.Array, delayed_bsx: jax.Array, segments_bs: jax.Array, halo: Halo,
                 start_x: jax.Array | None) -> jax.Array:  # fmt: skip
    before = jnp.concatenate([halo.delayed_b1x.astype(delayed_bsx.dtype), delayed_bsx[:, :-1]], 1)
    segment_before = jnp.concatenate([halo.segments_bw[:, -1:], segments_bs[:, :-1]], 1)
    start = jnp.zeros((), before.dtype) if start_x is None else start_x.astype(before.dtype)
    before = jnp.where((segment_before == segments_bs)[:, :, None], before, start)
    return jnp.concatenate([current_bsx, before], -1)
