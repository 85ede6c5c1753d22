"""A polynomial of Gram matrices: of symmetric products, of which kernels do only one half (docs/reference.md §3.2)."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.symmetric import gram, polynomial
from zaya_jax.config import ModelConfig
from zaya_jax.ops.operation import DTYPES, Check, Input, Kernel, Operation
from zaya_jax.ops.precision import accumulation_dtype


def gram_polynomial(x_xpq: jax.Array, b: jax.Array, c: jax.Array, scale_x: jax.Array) -> jax.Array:
    """bG + cG², where G = s²XXᵀ; it is not differentiated.

    Args:
      x_xpq: matrices in the last two axes, any axes before.
      b: scalar, in the dtype that sums are to have.
      c: likewise.
      scale_x: s of each matrix, in the dtype of sums.

    Returns:
      [x, p, p] in the dtype of `x_xpq`, by kernels exactly symmetric. G is rounded to that dtype before it is
      squared, and only there.
    """
    # The square of a scale may be out of the range of sums.
    scale_x11 = scale_x[..., None, None]
    gram_xpp = product(x_xpq, jnp.swapaxes(x_xpq, -1, -2), b.dtype) * scale_x11 * scale_x11
    low = gram_xpp.astype(x_xpq.dtype)
    return (b * gram_xpp + c * product(low, low, b.dtype)).astype(x_xpq.dtype)


def product(left: jax.Array, right: jax.Array, sums: jax.typing.DTypeLike) -> jax.Array:
    """Of stacks of matrices of one dtype; the result is as its sums are."""
    # Some GPUs would round fp32 operands to TF32; those in bf16 are exact whatever the precision.
    precision = jax.lax.Precision.HIGHEST if left.dtype != jnp.bfloat16 else None
    return jnp.matmul(left, right, precision=precision, preferred_element_type=sums)


def _unsupported(_architecture: str, x: jax.Array, b: jax.Array, _c: jax.Array, _scale: jax.Array) -> str:
    if x.dtype in DTYPES and b.dtype == jnp.float32:
        return ""
    return ("Kernels of symmetric products take bfloat16 or float32 and sum in float32, but this one is of "
            f"{x.dtype} with sums in {b.dtype}.")  # fmt: skip


def _kernel(architecture: str, x_xpq: jax.Array, b: jax.Array, c: jax.Array, scale_x: jax.Array) -> jax.Array:
    *stack, p, q = x_xpq.shape
    low, exact = gram(x_xpq.reshape(math.prod(stack), p, q), scale_x.reshape(-1), architecture=architecture)
    return polynomial(low, exact, jnp.stack([b, c]), architecture=architecture).reshape(*stack, p, p)


def _checks(model: ModelConfig, training: bool) -> dict[str, Check]:
    def run(gram_polynomial: Any, x: jax.Array) -> jax.Array:
        sums = accumulation_dtype(x.dtype)
        scale = jnp.full(x.shape[:1], (x.shape[1] * x.shape[2]) ** -0.5, sums)  # as Newton–Schulz begins
        return gram_polynomial(x, jnp.asarray(-4.775, sums), jnp.asarray(2.0315, sums), scale)

    matrix = Input((2, model.hidden_size, 2 * model.expert_size))
    return {"gram_polynomial": Check(run, (matrix,), 1, gradient=False)} if training else {}


GRAM_POLYNOMIAL = Operation("gram_polynomial", gram_polynomial, _checks, (Kernel("pallas", _kernel, _unsupported),))
