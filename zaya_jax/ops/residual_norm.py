"""A sublayer's output merged into the stream, and the RMSNorm of the new stream for the next sublayer."""

from typing import NamedTuple

import jax

from zaya_jax.ops.norm import rms_norm


class MergeVectors(NamedTuple):
    """Parameters of residual scaling (zaya1.md §1.6), [d] each."""

    hidden_scale_d: jax.Array
    hidden_bias_d: jax.Array
    residual_scale_d: jax.Array
    residual_bias_d: jax.Array


def merge(output_bsd: jax.Array, stream_bsd: jax.Array, vectors: MergeVectors | None) -> jax.Array:
    """The new stream (o + b_o)·s_o + (x + b_x)·s_x, or o + x without vectors, in the stream's dtype."""
    output_bsd = output_bsd.astype(stream_bsd.dtype)
    if vectors is None:
        return output_bsd + stream_bsd
    exact = MergeVectors(*(vector.astype(stream_bsd.dtype) for vector in vectors))
    output_bsd = (output_bsd + exact.hidden_bias_d) * exact.hidden_scale_d
    return output_bsd + (stream_bsd + exact.residual_bias_d) * exact.residual_scale_d


def residual_norm(
    output_bsd: jax.Array,
    stream_bsd: jax.Array,
    vectors: MergeVectors | None,
    weight_d: jax.Array,
    eps: float,
    dtype: jax.typing.DTypeLike,
) -> tuple[jax.Array, jax.Array]:
    """The new stream of `merge` and its norm.

    Args:
      output_bsd: of the sublayer, any leading axes.
      stream_bsd: fp32, or float64 throughout a run in double precision.
      vectors: scales and biases of both terms; None for a plain sum.
      weight_d: of the norm.
      eps: added to the mean square of a row.
      dtype: of the norm; the stream is rounded to it first (`rms_norm`).

    Returns:
      The new stream in the stream's dtype and its norm in `dtype`, both of the stream's shape.
    """
    new_bsd = merge(output_bsd, stream_bsd, vectors)
    return new_bsd, rms_norm(new_bsd, weight_d, eps, dtype)
