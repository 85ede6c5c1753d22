"""Muon's momentum update and direction in one pass, which reads or writes each array once.

Arrays are reshaped to rows whose length is the greatest common divisor of array and tile sizes, so that indices fit
32 bits. (If it is small, arrays are limited to 2³¹ elements.) The last program may have superfluous rows.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from pallas_kernels.launch import launch
from pallas_kernels.tiles import tile


def momentum_and_direction(
    gradient: jax.Array, momentum: jax.Array, numbers: jax.Array, *, dtype: jax.typing.DTypeLike, architecture: str
) -> tuple[jax.Array, jax.Array]:
    """Compute m' = a·m + b·f·g, and the direction c·m' + d·f·g.

    Args:
      gradient: g, bf16 or fp32.
      momentum: m, fp32 of the same shape; m' reuses its memory.
      numbers: fp32 [6]: f; whether to keep m; a, b, c, d.
      dtype: dtype of the direction, bf16 or fp32.
      architecture: see `launch`.

    Returns:
      m' and the direction, in the shape of `gradient`.
    """
    (elements,), warps, _ = tile("momentum", architecture, dtype)
    lanes = math.gcd(gradient.size, elements)
    shape, rows = (gradient.size // lanes, lanes), elements // lanes
    new, direction = launch(
        functools.partial(_kernel, rows=rows),
        gradient.reshape(shape), momentum.reshape(shape), numbers,
        name="momentum",
        grid=(pl.cdiv(shape[0], rows),),
        out_shape=(jax.ShapeDtypeStruct(shape, momentum.dtype), jax.ShapeDtypeStruct(shape, dtype)),
        warps=warps,
        aliases={1: 0},
        architecture=architecture,
    )  # fmt: skip
    return new.reshape(gradient.shape), direction.reshape(gradient.shape)


def _kernel(gradient_ref: Any, momentum_ref: Any, numbers_ref: Any, new_ref: Any, direction_ref: Any, *,
            rows: int) -> None:  # fmt: skip
    count, lanes = gradient_ref.shape
    row = (pl.program_id(0) * rows + jnp.arange(rows, dtype=jnp.int32))[:, None]
    lane = jnp.arange(lanes, dtype=jnp.int32)[None, :]
    inside = jnp.broadcast_to(row < count, (rows, lanes))
    factor, skip, a, b, c, d = (numbers_ref[index] for index in range(6))
    momentum = triton.load(momentum_ref.at[row, lane], mask=inside, other=0)
    gradient = factor * triton.load(gradient_ref.at[row, lane], mask=inside, other=0).astype(jnp.float32)
    new = a * momentum + b * gradient
    triton.store(new_ref.at[row, lane], jnp.where(skip != 0, momentum, new), mask=inside)
    triton.store(direction_ref.at[row, lane], (c * new + d * gradient).astype(direction_ref.dtype), mask=inside)
