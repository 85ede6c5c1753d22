"""`residual_norm` by a kernel: one pass over the rows forward, one backward."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.residual_norm import WIDEST, residual_norm_backward, residual_norm_forward
from zaya_jax.ops.residual_norm import MergeVectors

_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))


def residual_norm_kernel(
    output_bsd: jax.Array,
    stream_bsd: jax.Array,
    vectors: MergeVectors | None,
    weight_d: jax.Array,
    eps: float,
    dtype: jax.typing.DTypeLike,
    *,
    platform: str,
) -> tuple[jax.Array, jax.Array]:
    """What `residual_norm` returns, and its gradients.

    Nothing but the arguments is kept for the backward pass. It rounds where the reference rounds forward, and keeps
    in fp32 what the reference rounds on the way back: the norm's share of the stream's gradient, and the terms of the
    parameters' gradients.

    Args:
      output_bsd: bf16 or fp32, any leading axes.
      stream_bsd: fp32, of the same shape.
      vectors: bf16 or fp32 [d] each, or None.
      weight_d: bf16 or fp32.
      eps: added to the mean square of a row.
      dtype: of the norm, bf16 or fp32.
      platform: 'cuda', 'rocm' or 'interpret'.

    Raises:
      ValueError: a dtype, a shape or a width that the kernel does not do.
    """
    _refuse(output_bsd, stream_bsd, vectors, weight_d, dtype)
    return _residual_norm(output_bsd, stream_bsd, vectors, weight_d, eps, jnp.dtype(dtype), platform)


def _refuse(
    output: jax.Array,
    stream: jax.Array,
    vectors: MergeVectors | None,
    weight: jax.Array,
    dtype: jax.typing.DTypeLike,
) -> None:
    if stream.dtype != jnp.float32:
        raise ValueError(f"The residual-norm kernel wants an fp32 stream, not {stream.dtype}.")
    for name, found in {
        "output": output.dtype,
        "norm": jnp.dtype(dtype),
        "norm's weight": weight.dtype,
        **{name: vector.dtype for name, vector in (vectors._asdict() if vectors else {}).items()},
    }.items():
        if found not in _DTYPES:
            raise ValueError(f"The residual-norm kernel does bfloat16 and float32, but its {name} is {found}.")
    if output.shape != stream.shape:
        raise ValueError(f"The residual-norm kernel wants output and stream of one shape, not {output.shape} and "
                         f"{stream.shape}.")  # fmt: skip
    width = stream.shape[-1] if stream.ndim else 0
    if not 1 <= width <= WIDEST or stream.size == 0:
        raise ValueError(f"The residual-norm kernel does rows of 1 to {WIDEST} elements, and at least one of them, not "
                         f"{stream.shape}.")  # fmt: skip
    for vector in (weight, *(vectors or ())):
        if vector.shape != (width,):
            raise ValueError(f"The residual-norm kernel wants vectors of shape {(width,)}, not {vector.shape}.")


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _residual_norm(
    output: jax.Array,
    stream: jax.Array,
    vectors: MergeVectors | None,
    weight: jax.Array,
    eps: float,
    dtype: jnp.dtype,
    platform: str,
) -> tuple[jax.Array, jax.Array]:
    new, normed = residual_norm_forward(
        _rows(output), _rows(stream), tuple(vectors or ()), weight, eps=eps, dtype=dtype, platform=platform
    )
    return new.reshape(stream.shape), normed.reshape(stream.shape)


def _forward(
    output: jax.Array,
    stream: jax.Array,
    vectors: MergeVectors | None,
    weight: jax.Array,
    eps: float,
    dtype: jnp.dtype,
    platform: str,
) -> tuple:
    return _residual_norm(output, stream, vectors, weight, eps, dtype, platform), (output, stream, vectors, weight)


def _backward(eps: float, _dtype: jnp.dtype, platform: str, kept: tuple, gradients: tuple) -> tuple:
    output, stream, vectors, weight = kept
    d_output, d_stream, d_parameters = residual_norm_backward(
        _rows(output), _rows(stream), tuple(vectors or ()), weight, *(_rows(gradient) for gradient in gradients),
        eps=eps, platform=platform,
    )  # fmt: skip
    d_weight, *d_vectors = d_parameters
    if vectors is not None:
        vectors = MergeVectors(*(d.astype(vector.dtype) for d, vector in zip(d_vectors, vectors, strict=True)))
    return d_output.reshape(output.shape), d_stream.reshape(stream.shape), vectors, d_weight.astype(weight.dtype)


_residual_norm.defvjp(_forward, _backward)


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])
