"""RMSNorm: statistics in fp32, result in the dtype asked for."""

from typing import Any

import jax
import jax.numpy as jnp

from zaya_jax.config import ModelConfig
from zaya_jax.ops.operation import ROWS, Check, Input, Operation
from zaya_jax.ops.precision import accumulation_dtype


def rms_norm(x: jax.Array, weight: jax.Array, eps: float, dtype: jax.typing.DTypeLike) -> jax.Array:
    """`x` over its root mean square along the last axis, times `weight` (zaya1.md §1.2).

    The stream is cast to `dtype` first and the normalised value again before the product with the weight,
    which is where the reference rounds.
    """
    exact = x.astype(dtype).astype(accumulation_dtype(dtype))
    normed = exact * jax.lax.rsqrt(jnp.mean(exact * exact, -1, keepdims=True) + eps)
    return weight.astype(dtype) * normed.astype(dtype)


def _checks(model: ModelConfig, _training: bool) -> dict[str, Check]:
    def run(rms_norm: Any, x: jax.Array, weight: jax.Array) -> jax.Array:
        return rms_norm(x, weight, 1e-5, x.dtype)

    d = model.hidden_size
    return {"rms_norm": Check(run, (Input((ROWS, d)), Input((d,), 0.1, 1.0)), 1)}


RMS_NORM = Operation("rms_norm", rms_norm, _checks)
