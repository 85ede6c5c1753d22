"""A polynomial of Gram matrices; the kernels compute only half of each symmetric matmul (docs/reference.md §3.2)."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.symmetric import gram, polynomial
from pallas_kernels.tiles import Architecture
from zaya_jax.config import ModelConfig
from zaya_jax.ops.operation import DTYPES, Check, Input, Kernel, Operation
from zaya_jax.ops.precision import accumulation_dtype


def gram_polynomial(x_xpq: jax.Array, b: jax.Array, c: jax.Array, scale_x: jax.Array) -> jax.Array:
    """Compute bG + cG² with G = s²XXᵀ, the matrices X in the last two axes; not differentiable.

    b, c and s of each matrix, `scale_x`, have the accumulation dtype. Returns [x, p, p] in the dtype of `x_xpq`;
    exactly symmetric with kernels. G is rounded to that dtype before it is squared.
    """
    # Two multiplications, since the square of a scale may overflow.
    scale_x11 = scale_x[..., None, None]
    gram_xpp = product(x_xpq, jnp.swapaxes(x_xpq, -1, -2), b.dtype) * scale_x11 * scale_x11
    low = gram_xpp.astype(x_xpq.dtype)
    return (b * gram_xpp + c * product(low, low, b.dtype)).astype(x_xpq.dtype)


def product(left: jax.Array, right: jax.Array, sums: jax.typing.DTypeLike) -> jax.Array:
    """Multiply stacks of matrices of one dtype; the result has the dtype `sums`."""
    # Some GPUs would round fp32 operands to TF32; bf16 operands are exact at any precision.
    precision = jax.lax.Precision.HIGHEST if left.dtype != jnp.bfloat16 else None
    return jnp.matmul(left, right, precision=precision, preferred_element_type=sums)


def _unsupported(_architecture: str, x: jax.Array, b: jax.Array, _c: jax.Array, _scale: jax.Array) -> str:
    if x.dtype in DTYPES and b.dtype == jnp.float32:
        return ""
    dtypes = f"{x.dtype} with sums in {b.dtype}"
    return f"The gram_polynomial kernels support bfloat16 or float32 with sums in float32, not {dtypes}."


def _kernel(architecture: Architecture, x_xpq: jax.Array, b: jax.Array, c: jax.Array, scale_x: jax.Array) -> jax.Array:
    *stack, p, q = x_xpq.shape
    low, exact = gram(x_xpq.reshape(math.prod(stack), p, q), scale_x.reshape(-1), architecture=architecture)
    return polynomial(low, exact, jnp.stack([b, c]), architecture=architecture).reshape(*stack, p, p)


def _checks(model: ModelConfig, training: bool) -> dict[str, Check]:
    def run(gram_polynomial: Any, x: jax.Array) -> jax.Array:
        sums = accumulation_dtype(x.dtype)
        scale = jnp.full(x.shape[:1], (x.shape[1] * x.shape[2]) ** -0.5, sums)  # as in the first Newton–Schulz step
        return gram_polynomial(x, jnp.asarray(-4.775, sums), jnp.asarray(2.0315, sums), scale)

    matrix = Input((2, model.hidden_size, 2 * model.expert_size))
    return {"gram_polynomial": Check(run, (matrix,), 1, gradient=False)} if training else {}


def _shape(x: jax.Array, *_: Any) -> tuple[int, ...]:
    return (x.shape[-2],)


_KERNEL = Kernel("pallas", _kernel, _unsupported, ("symmetric",))
GRAM_POLYNOMIAL = Operation("gram_polynomial", gram_polynomial, _checks, (_KERNEL,), shape=_shape)
