"""Merge a sublayer's output into the residual stream, and apply the next sublayer's RMSNorm.

The kernels make one pass over the rows forward and one backward, and save only the arguments. The forward pass rounds
where the reference does. The backward pass keeps fp32 where the reference rounds: in the norm's contribution to the
stream's gradient, and in the terms of the parameters' gradients.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.residual_norm import WIDEST, Inputs, residual_norm_backward, residual_norm_forward
from pallas_kernels.tiles import Architecture
from zaya_jax.config import ModelConfig
from zaya_jax.ops.names import recomputed
from zaya_jax.ops.norm import rms_norm
from zaya_jax.ops.operation import DTYPES, ROWS, Check, Input, Kernel, Operation
from zaya_jax.ops.precision import accumulation_dtype


class MergeVectors(NamedTuple):
    """Parameters of residual scaling (docs/reference.md §1.6), [d] each."""

    hidden_scale_d: jax.Array
    hidden_bias_d: jax.Array
    residual_scale_d: jax.Array
    residual_bias_d: jax.Array


Vectors = MergeVectors | None


def merge(output_bsd: jax.Array, stream_bsd: jax.Array, vectors: Vectors) -> jax.Array:
    """Return the new residual stream (o + b_o)·s_o + (x + b_x)·s_x, or o + x without vectors, in the stream's dtype."""
    output_bsd = output_bsd.astype(stream_bsd.dtype)
    if vectors is None:
        return output_bsd + stream_bsd
    exact = MergeVectors(*(vector.astype(stream_bsd.dtype) for vector in vectors))
    output_bsd = (output_bsd + exact.hidden_bias_d) * exact.hidden_scale_d
    return output_bsd + (stream_bsd + exact.residual_bias_d) * exact.residual_scale_d


@functools.partial(recomputed, static_argnums=(4, 5))
def residual_norm(
    output_bsd: Array, stream_bsd: Array, vectors: Vectors, weight_d: Array, eps: float, dtype: DTypeLike, *_kept: Any
) -> tuple[jax.Array, jax.Array]:
    """Merge an output into the residual stream, and normalize the result.

    Args:
      output_bsd: output of the sublayer, with any leading axes.
      stream_bsd: residual stream, fp32 (float64 in double precision).
      vectors: scales and biases of both terms; None for a plain sum.
      weight_d: weight of the norm.
      eps: added to the mean square of a row.
      dtype: dtype of the norm; the stream is rounded to it first (`rms_norm`).
      _kept: outputs of all layers [l, t, d] and the int32 index of `output_bsd`, if a backward pass can read it there.

    Returns:
      The new residual stream in its dtype, and its norm in `dtype`; both of the stream's shape.
    """
    new_bsd = merge(output_bsd, stream_bsd, vectors)
    return new_bsd, rms_norm(new_bsd, weight_d, eps, dtype)


def _unsupported(
    _architecture: str, output: jax.Array, stream: jax.Array, vectors: Vectors, weight: jax.Array, *static: Any
) -> str:
    _eps, dtype, *_ = static
    width, parameters = stream.shape[-1] if stream.ndim else 0, (weight, *(vectors or ()))
    kinds = [jnp.dtype(kind) for kind in (output.dtype, dtype, *(x.dtype for x in parameters))]
    if stream.dtype != jnp.float32 or not {*kinds} <= {*DTYPES}:
        others = f"{stream.dtype} with {', '.join(kind.name for kind in kinds)} (output, norm, parameters)"
        return f"The residual-norm kernel supports bfloat16 and float32 with a float32 stream, not {others}."
    if output.shape != stream.shape or not 1 <= width <= WIDEST or stream.size == 0:
        return (f"The residual-norm kernel needs output and stream of the same shape, with at least one row of 1 to "
                f"{WIDEST} elements, not {output.shape} and {stream.shape}.")  # fmt: skip
    if shapes := {x.shape for x in parameters} - {(width,)}:
        return f"The residual-norm kernel needs vectors of shape {(width,)}, not {', '.join(map(str, shapes))}."
    return ""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 5, 6))
def _kernel(architecture: Architecture, *arguments: Any) -> tuple[jax.Array, jax.Array]:
    output, stream, vectors, weight, eps, dtype, *_ = arguments
    inputs = _inputs(output, stream, vectors, weight)
    new, normed = residual_norm_forward(inputs, eps=eps, dtype=dtype, architecture=architecture)
    return new.reshape(stream.shape), normed.reshape(stream.shape)


def _inputs(output: Any, stream: Any, vectors: Any, weight: Any, *kept: Any) -> Inputs:
    output_td, layer = (kept[0], jnp.reshape(kept[1], 1)) if kept else (_rows(output), None)
    return Inputs(output_td, _rows(stream), tuple(vectors or ()), weight, layer)


def _backward(
    architecture: Architecture, eps: float, _dtype: DTypeLike, saved: tuple[Any, ...], gradients: tuple
) -> tuple:
    output, stream, vectors, weight, *kept = saved
    inputs, rows = _inputs(*saved), map(_rows, gradients)
    d_output, d_stream, d_parameters = residual_norm_backward(inputs, *rows, eps=eps, architecture=architecture)
    d_weight, *d_vectors = d_parameters
    if vectors is not None:
        vectors = MergeVectors(*(d.astype(vector.dtype) for d, vector in zip(d_vectors, vectors, strict=True)))
    d_terms = d_output.reshape(output.shape), d_stream.reshape(stream.shape), vectors
    return *d_terms, d_weight.astype(weight.dtype), *(None for _ in kept)


_kernel.defvjp(lambda *arguments: (_kernel(*arguments), (*arguments[1:5], *arguments[7:])), _backward)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def _checks(model: ModelConfig, _training: bool) -> dict[str, Check]:
    d = model.hidden_size

    def run(residual_norm: Any, output: jax.Array, stream: jax.Array, *parameters: jax.Array) -> Any:
        exact, (*vectors, weight) = accumulation_dtype(output.dtype), parameters
        scales = MergeVectors(*(vector.astype(exact) for vector in vectors))
        return residual_norm(output, stream.astype(exact), scales, weight, 1e-5, output.dtype)

    rows, vectors = [Input((ROWS, d))] * 2, [Input((d,), 0.1, 1.0), Input((d,), 0.1)] * 2
    return {"residual_norm": Check(run, (*rows, *vectors, Input((d,))), 2)}


def _shape(_output: Any, stream: jax.Array, *_: Any) -> tuple[int, ...]:
    return stream.size // stream.shape[-1], stream.shape[-1]


_KERNEL = Kernel("pallas", _kernel, _unsupported, ("residual_norm", "residual_norm_backward"))
RESIDUAL_NORM = Operation("residual_norm", residual_norm, _checks, (_KERNEL,), shape=_shape)
