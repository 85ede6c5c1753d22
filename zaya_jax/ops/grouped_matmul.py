"""Products of sorted rows with the matrix of their group, dropless, for any split into groups.

Rows stand sorted by group; group e owns `sizes_e[e]` of them, and rows past the sum of the sizes (the skip class,
padding) are ignored and yield zeros. The product and each of its gradients are separate operations, each with its
kernel. The references loop over blocks of rows and do only the work there is: `jax.lax.ragged_dot`
multiplies every row with every expert, on a CPU always and on GPUs usually.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import grouped_matmul as kernels
from zaya_jax.config import ModelConfig
from zaya_jax.ops.operation import ROWS, Check, Input, Kernel, Operation, other_dtypes
from zaya_jax.ops.precision import accumulation_dtype

ROW_BLOCKS = (64, 128, 192, 256, 384)
Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def grouped_product(x_tp: jax.Array, w_epq: jax.Array, sizes_e: jax.Array) -> jax.Array:
    """`x_tp[rows of e] @ w_epq[e]` for every group e; not differentiable.

    Args:
      x_tp: rows sorted by group, float.
      w_epq: one matrix a group.
      sizes_e: int32 rows of each group; their sum is at most t.

    Returns:
      [t, q] in the dtype of `x_tp`, sums in fp32; zero in rows past the groups.
    """
    return _blocks_times_matrix(x_tp, w_epq, sizes_e)


def grouped_product_transposed(x_tq: jax.Array, w_epq: jax.Array, sizes_e: jax.Array) -> jax.Array:
    """`x_tq[rows of e] @ w_epq[e].T` for every group e, [t, p], as `grouped_product`."""
    return _blocks_times_matrix(x_tq, w_epq, sizes_e, transpose=True)


def grouped_outer(x_tp: jax.Array, y_tq: jax.Array, sizes_e: jax.Array) -> jax.Array:
    """`x_tp[rows of e].T @ y_tq[rows of e]` for every group e, [e, p, q] in the dtype of `x_tp`, sums in fp32."""
    return _sum_of_outer_products(x_tp, y_tq, sizes_e).astype(x_tp.dtype)


def grouped_matmul(
    x_tp: jax.Array, w_epq: jax.Array, sizes_e: jax.Array, *, grouped_product: Product = grouped_product,
    grouped_product_transposed: Product = grouped_product_transposed, grouped_outer: Product = grouped_outer,
) -> jax.Array:  # fmt: skip
    """`grouped_product`, whose gradients are those of the other two; takes the implementations of all three."""
    return _grouped_matmul((grouped_product, grouped_product_transposed, grouped_outer), x_tp, w_epq, sizes_e)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _grouped_matmul(
    products: tuple[Product, ...], x_tp: jax.Array, w_epq: jax.Array, sizes_e: jax.Array
) -> jax.Array:  # fmt: skip
    return products[0](x_tp, w_epq, sizes_e)


def _forward(products: tuple[Product, ...], x_tp: jax.Array, w_epq: jax.Array, sizes_e: jax.Array) -> tuple[Any, Any]:
    return products[0](x_tp, w_epq, sizes_e), (x_tp, w_epq, sizes_e)


def _backward(products: tuple[Product, ...], saved: Any, dout_tq: jax.Array) -> tuple[Any, ...]:
    x_tp, w_epq, sizes_e = saved
    dx_tp, dw_epq = products[1](dout_tq, w_epq, sizes_e), products[2](x_tp, dout_tq, sizes_e)
    return dx_tp, dw_epq.astype(w_epq.dtype), np.zeros(sizes_e.shape, jax.dtypes.float0)


_grouped_matmul.defvjp(_forward, _backward)


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


# --- the kernels -----------------------------------------------------------------------------------------------


def _unsupported(inner: int, _architecture: str, x: jax.Array, w: jax.Array, sizes: jax.Array) -> str:
    """`inner` is the axis of the matrices that is summed over."""
    if why := other_dtypes("grouped products", x, w):
        return why
    if x.ndim == 2 and w.ndim == 3 and sizes.shape == w.shape[:1] and x.shape[1] == w.shape[inner]:
        return ""
    return ("A grouped product takes rows [t, p], matrices [e, p, q] and sizes [e], "
            f"not {x.shape}, {w.shape} and {sizes.shape}.")  # fmt: skip


def _outer_unsupported(_architecture: str, x: jax.Array, y: jax.Array, _sizes: jax.Array) -> str:
    return other_dtypes("grouped products", x, y)


def _kernel(transpose: bool, architecture: str, *arrays: jax.Array) -> jax.Array:
    return kernels.grouped_product(*arrays, transpose=transpose, architecture=architecture)


def _outer_kernel(architecture: str, x_tp: jax.Array, y_tq: jax.Array, sizes_e: jax.Array) -> jax.Array:
    return kernels.grouped_outer(x_tp, y_tq, sizes_e, dtype=x_tp.dtype, architecture=architecture)


# --- the checks ------------------------------------------------------------------------------------------------


def split(groups: int, rows: int) -> np.ndarray:
    """int32 [groups]: three tenths of the rows to the first, none to the last of several, a tenth to no group."""
    shares = [0.3, *[0.6 / max(groups - 2, 1)] * (groups - 2), 0.0][:groups]
    return (np.array(shares) * rows).astype(np.int32)


def _inputs(model: ModelConfig) -> tuple[Input, Input, Input]:
    """Rows of tokens, rows of gate and up, matrices between."""
    d, f = model.hidden_size, 2 * model.expert_size
    return Input((ROWS, d)), Input((ROWS, f)), Input((min(model.num_experts, 4), d, f), d**-0.5)


def _operation(reference: Product, arrays: tuple[int, int], kernel: Kernel) -> Operation:
    """One of the three; `arrays` are those of `_inputs` that its check takes."""
    name: str = reference.__name__  # pyright: ignore[reportFunctionMemberAccess]

    def checks(model: ModelConfig, _training: bool) -> dict[str, Check]:
        def run(product: Product, x: jax.Array, y: jax.Array) -> jax.Array:
            return product(x, y, jnp.asarray(split(min(model.num_experts, 4), ROWS) * (x.shape[0] // ROWS)))

        inputs = tuple(_inputs(model)[index] for index in arrays)
        return {name: Check(run, inputs, sum(x.shape[0] == ROWS for x in inputs), gradient=False)}

    return Operation(name, reference, checks, (kernel,))


GROUPED_PRODUCT, GROUPED_PRODUCT_TRANSPOSED = (
    _operation(reference, arrays, Kernel("pallas", functools.partial(_kernel, transpose),
                                         functools.partial(_unsupported, 1 + transpose)))
    for reference, arrays, transpose in
    ((grouped_product, (0, 2), False), (grouped_product_transposed, (1, 2), True))
)  # fmt: skip
GROUPED_OUTER = _operation(grouped_outer, (0, 1), Kernel("pallas", _outer_kernel, _outer_unsupported))
