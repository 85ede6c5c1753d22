"""Symmetric matmuls: one program for each tile on or above the diagonal, which it stores twice.

Both kernels sum A Aᵀ over chunks of A's columns, for a tile of rows i and a tile of rows j ≥ i. One returns the Gram
matrix itself, the other Newton–Schulz' polynomial of it.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from pallas_kernels.launch import Out, launch, load, store
from pallas_kernels.product import product
from pallas_kernels.tiles import Architecture, Tile, tile

Epilogue = Callable[..., jax.Array]  # sum of a tile, its matrix and place, then references → the tile to store


def gram(x_npq: jax.Array, scale_n: jax.Array, *, architecture: Architecture) -> tuple[jax.Array, jax.Array]:
    """Compute G = s² X Xᵀ for each matrix, in the form that `polynomial` takes.

    X is in bf16 or fp32, s of each matrix in fp32. Returns G, [n, p, p] in the dtype of X and exactly symmetric; and
    its unrounded tiles on and above the diagonal, fp32 [n, tiles, rows, rows] in the order of `upper_tiles`, zero
    outside of the matrix.
    """
    (n, p, _), cut = x_npq.shape, _tile(x_npq, architecture)
    exact = Out((n, len(upper_tiles(p, cut)[0]), cut.sizes[0], cut.sizes[0]), jnp.float32)
    return _symmetric("gram", _gram_epilogue, x_npq, (scale_n,), exact, cut.sizes[1], architecture)


def polynomial(
    low_npp: jax.Array, exact: jax.Array, coefficients: jax.Array, *, architecture: Architecture
) -> jax.Array:
    """Compute b G + c G² for each symmetric matrix; exactly symmetric, in the dtype of `low_npp`.

    G² is that of `low_npp`, which is rounded; the linear term is that of `exact`, its unrounded tiles. The coefficients
    b and c are fp32 [2].
    """
    depth = _tile(low_npp, architecture).sizes[2]
    operands = exact, coefficients
    return _symmetric("gram_polynomial", _polynomial_epilogue, low_npp, operands, None, depth, architecture)[0]


def upper_tiles(p: int, cut: Tile) -> tuple[np.ndarray, np.ndarray]:
    """Return row and column, int32, of each tile on or above the diagonal of a p × p matrix."""
    first, second = np.triu_indices(pl.cdiv(p, cut.sizes[0]))
    return first.astype(np.int32), second.astype(np.int32)


def _tile(x: jax.Array, architecture: Architecture) -> Tile:
    return tile("symmetric", architecture, x.dtype)


def _symmetric(
    name: str, epilogue: Epilogue, x_npq: jax.Array, operands: Any, further: Any, depth: int, architecture: Architecture
) -> tuple[jax.Array, Any]:
    """Apply `epilogue` to every upper tile of X Xᵀ, in chunks of `depth` columns of X.

    `further` is an output that the epilogue stores itself.
    """
    (n, p, _), cut = x_npq.shape, _tile(x_npq, architecture)
    rows, columns = (jnp.asarray(index) for index in upper_tiles(p, cut))
    kernel, out = functools.partial(_kernel, epilogue, cut.sizes[0], depth), (Out((n, p, p), x_npq.dtype), further)
    arrays = ((x_npq, rows, columns, operands),)
    return launch(name, kernel, arrays, out, (len(rows), n), cut, architecture)


def _kernel(epilogue: Epilogue, size: int, depth: int, inputs: tuple[Any, ...], out: Any, further: Any) -> None:
    x, rows_of, columns_of, operands = inputs
    _, p, q = x.shape
    place, matrix = pl.program_id(0), pl.program_id(1)
    i, j = rows_of[place], columns_of[place]
    rows, columns = (block * size + jnp.arange(size, dtype=jnp.int32) for block in (i, j))

    def chunk(number: jax.Array, total: jax.Array) -> jax.Array:
        inner = number * depth + jnp.arange(depth, dtype=jnp.int32)

        def block(outer: jax.Array) -> jax.Array:
            mask = (outer < p)[:, None] & (inner < q)[None, :]
            return load(x.at[matrix, outer[:, None], inner[None, :]], mask=mask)

        return total + product(block(rows), block(columns), (1, 1))

    total = jax.lax.fori_loop(0, pl.cdiv(q, depth), chunk, jnp.zeros((size, size), jnp.float32))
    value = epilogue(total, matrix, place, *operands, further).astype(out.dtype)
    # Both halves of a diagonal tile are summed in different orders, so one is replaced by the mirror of the other.
    value = jnp.where(rows[:, None] <= columns[None, :], value, value.T)
    store(out.at[matrix, rows[:, None], columns[None, :]], value, mask=(rows < p)[:, None] & (columns < p)[None, :])
    store(
        out.at[matrix, columns[:, None], rows[None, :]],
        value.T,
        mask=((columns < p) & (i < j))[:, None] & (rows < p)[None, :],
    )


def _gram_epilogue(total: jax.Array, matrix: jax.Array, place: jax.Array, scale: Any, exact: Any) -> jax.Array:
    value = total * scale[matrix] * scale[matrix]  # two multiplications, since the square of a scale may overflow
    exact[matrix, place] = value
    return value


def _polynomial_epilogue(
    total: jax.Array, matrix: jax.Array, place: jax.Array, exact: Any, ab: Any, _: Any
) -> jax.Array:
    return ab[0] * exact[matrix, place] + ab[1] * total
