"""Products of sorted rows with the matrix of their group, dropless, for any split into groups.

Rows stand sorted by group; group e owns `sizes_e[e]` of them, and rows past the sum of the sizes (the skip
class, padding) take part in nothing and come out zero. Three implementations:

* `reference`, a loop over blocks of rows that does only the work there is: on a CPU `jax.lax.ragged_dot`
  multiplies every row with every expert.
* the kernel, on a GPU: `ops.grouped_matmul_kernel`.
* `xla`, `jax.lax.ragged_dot`, on a GPU whose target is without the kernel.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from zaya_jax.ops.grouped_matmul_kernel import grouped_matmul_kernel
from zaya_jax.ops.precision import accumulation_dtype
from zaya_jax.ops.target import Target, current_target

ROW_BLOCKS = (64, 128, 192, 256, 384)


def grouped_matmul(x_tp: jax.Array, w_epq: jax.Array, sizes_e: jax.Array, *, target: Target | None = None) -> jax.Array:
    """`x_tp[rows of e] @ w_epq[e]` for every group e.

    Args:
      x_tp: rows sorted by group, float.
      w_epq: one matrix a group.
      sizes_e: int32 rows of each group; their sum is at most t.
      target: what to compile for; the default device where None.

    Returns:
      [t, q] in the dtype of `x_tp`, sums in fp32; zero in rows past the groups.
    """
    target = target or current_target()
    if target.platform == "cpu":
        return _reference(x_tp, w_epq, sizes_e)
    platform = target.kernel("grouped_matmul")
    if platform is None:
        return _xla(x_tp, w_epq, sizes_e)
    return grouped_matmul_kernel(x_tp, w_epq, sizes_e, platform=platform)


def _xla(x_tp: jax.Array, w_epq: jax.Array, sizes_e: jax.Array) -> jax.Array:
    out = jax.lax.ragged_dot(x_tp, w_epq, sizes_e, preferred_element_type=accumulation_dtype(x_tp.dtype)).astype(
        x_tp.dtype
    )
    # What stands past the groups is undefined on some backends, in the gradient of x as well as here.
    return jnp.where((jnp.arange(x_tp.shape[0]) < sizes_e.sum())[:, None], out, 0)


@jax.custom_vjp
def _reference(x_tp: jax.Array, w_epq: jax.Array, sizes_e: jax.Array) -> jax.Array:
    return _blocks_times_matrix(x_tp, w_epq, sizes_e)


def _reference_forward(x_tp: jax.Array, w_epq: jax.Array, sizes_e: jax.Array) -> tuple[jax.Array, Any]:
    return _blocks_times_matrix(x_tp, w_epq, sizes_e), (x_tp, w_epq, sizes_e)


def _reference_backward(saved: Any, dout_tq: jax.Array) -> tuple[Any, ...]:
    x_tp, w_epq, sizes_e = saved
    dx_tp = _blocks_times_matrix(dout_tq, w_epq, sizes_e, transpose=True)
    dw_epq = _sum_of_outer_products(x_tp, dout_tq, sizes_e).astype(w_epq.dtype)
    return dx_tp, dw_epq, np.zeros(sizes_e.shape, jax.dtypes.float0)


_reference.defvjp(_reference_forward, _reference_backward)


@functools.partial(jax.jit, static_argnames="transpose")
def _blocks_times_matrix(x_tp: jax.Array, w_epq: jax.Array, sizes_e: jax.Array, transpose: bool = False) -> jax.Array:
    equation = "tq,pq->tp" if transpose else "tp,pq->tq"
    width = w_epq.shape[1] if transpose else w_epq.shape[2]

    def one_group(out: jax.Array, group: tuple[jax.Array, ...]) -> tuple[jax.Array, None]:
        w, start, size = group

        def one_block(out: jax.Array, first: jax.Array, inside: jax.Array) -> jax.Array:
            rows = jax.lax.dynamic_slice_in_dim(x_tp, first, inside.shape[0])
            part = jnp.einsum(equation, rows, w, preferred_element_type=accumulation_dtype(out.dtype)).astype(out.dtype)
            old = jax.lax.dynamic_slice_in_dim(out, first, inside.shape[0])
            return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(inside[:, None], part, old), first, 0)

        return _over_blocks(one_block, out, start, size, x_tp.shape[0]), None

    out = jnp.zeros((x_tp.shape[0], width), x_tp.dtype)
    return jax.lax.scan(one_group, out, (w_epq, jnp.cumsum(sizes_e) - sizes_e, sizes_e))[0]


@jax.jit
def _sum_of_outer_products(x_tp: jax.Array, dout_tq: jax.Array, sizes_e: jax.Array) -> jax.Array:
    x_pt = x_tp.T  # once and for all groups, or each block's product would transpose its own

    def one_group(_: None, group: tuple[jax.Array, jax.Array]) -> tuple[None, jax.Array]:
        def one_block(dw: jax.Array, first: jax.Array, inside: jax.Array) -> jax.Array:
            rows_pt = jnp.where(inside, jax.lax.dynamic_slice_in_dim(x_pt, first, inside.shape[0], 1), 0)
            dout = jax.lax.dynamic_slice_in_dim(dout_tq, first, inside.shape[0])
            return dw + jnp.einsum("pt,tq->pq", rows_pt, dout, preferred_element_type=dw.dtype)

        zeros = jnp.zeros((x_tp.shape[1], dout_tq.shape[1]), accumulation_dtype(x_tp.dtype))
        return None, _over_blocks(one_block, zeros, *group, x_tp.shape[0])

    return jax.lax.scan(one_group, None, (jnp.cumsum(sizes_e) - sizes_e, sizes_e))[1]


def _over_blocks(body: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], carry: jax.Array, start: jax.Array,
                 size: jax.Array, rows: int) -> jax.Array:  # fmt: skip
    """`body(carry, first row of a block, which of its rows are the group's)` over the rows of a group.

    Blocks of the largest size, then one of the smallest that holds what is left: a product has a fixed price,
    so that few blocks are cheap, and a row too many has its own.
    """
    blocks = [block for block in ROW_BLOCKS if block <= rows] or [rows]
    whole = size // blocks[-1]
    left = size - whole * blocks[-1]
    for smaller, block in zip([0, *blocks], blocks, strict=False):
        needed = ((left > smaller) & (left <= block)).astype(jnp.int32)
        base, count = (0, whole + needed) if block == blocks[-1] else (whole * blocks[-1], needed)

        def one(index: jax.Array, carry: jax.Array, base: Any = base, block: int = block) -> jax.Array:
            # A block past the end of all rows is moved back; what it covers again is not its own.
            wanted = start + base + index * block
            first = jnp.minimum(wanted, rows - block)
            row = first + jnp.arange(block)
            return body(carry, first, (row >= wanted) & (row < start + size))

        carry = jax.lax.fori_loop(0, count, one, carry)
    return carry
